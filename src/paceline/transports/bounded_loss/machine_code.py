"""Compiles functions with numba, without the interpreter's lock, and copies memory by its address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba import types

_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(function: _F) -> _F:
    """Compile when first called, and keep the code on disk; it runs without the interpreter's lock.

    References to arrays are not counted, so nothing can be allocated: the counting would be most of the code.
    """
    options: Any = {"nogil": True, "cache": True, "error_model": "numpy", "_nrt": False}
    return cast("_F", numba.njit(**options)(function))


copy_memory: Any = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))
"""C's memcpy by addresses: to, from, bytes."""
