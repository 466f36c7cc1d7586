"""Compiles functions with numba, without the interpreter's lock, and reads memory by its address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core import cgutils, types
from numba.extending import intrinsic

_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(function: _F) -> _F:
    """Compile when first called, and keep the code on disk; it runs without the interpreter's lock."""
    return cast("_F", numba.njit(nogil=True, cache=True, error_model="numpy")(function))


def _pointer(_typing_context: Any, address: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


pointer: Callable[[int], Any] = intrinsic(_pointer)
"""Turn an address into what `numba.carray` takes; only within compiled functions."""
