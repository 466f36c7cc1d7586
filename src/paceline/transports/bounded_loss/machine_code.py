"""Compiles functions with numba, without the interpreter's lock, and copies memory by its address."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba import types

from paceline.numba_cache import keep, stamp_of

_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(function: _F) -> _F:
    """Compile when first called, and keep the code on disk; it runs without the interpreter's lock.

    References to arrays are not counted, so nothing can be allocated: the counting would be most of the code.
    """
    return _compiled(function)


def inner(function: _F) -> _F:
    """As `compiled`, for what only compiled code calls: without the code that unpacks Python's arguments.

    An endpoint's tables are dozens of arrays, so that code takes as long to compile as the function.
    """
    return _compiled(function, no_cpython_wrapper=True)


def _compiled(function: _F, **more: Any) -> _F:
    options: Any = {
        "nogil": True,
        "cache": True,
        "error_model": "numpy",
        "_nrt": False,
        "no_cfunc_wrapper": True,
    }
    made: Any = numba.njit(**options, **more)(function)
    # numba looks at the function's own file only, but what it calls, and the columns of the tables, are compiled in.
    keep(made, _SOURCES)
    return cast("_F", made)


_SOURCES = stamp_of(Path(__file__).parent.glob("*.py"))


copy_memory: Any = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))
"""C's memcpy by addresses: to, from, bytes."""
