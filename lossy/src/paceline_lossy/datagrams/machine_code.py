"""Compiles functions with numba, without the interpreter's lock, and copies memory by its address."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import types

from paceline import numba_cache
from paceline.numba_cache import keep, stamp_of

_F = TypeVar("_F", bound=Callable[..., Any])


_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False}
_SOURCES = stamp_of([Path(numba_cache.__file__), *Path(__file__).parent.glob("*.py")])


def compiled(function: _F) -> _F:
    """Return the function compiled at its first call, without the interpreter's lock, and keep the code on disk.

    References to arrays are not counted, because the counting would be most of the code. So it cannot allocate arrays.
    """
    made = numba_cache.entry(function, _OPTIONS)
    # numba watches the function's own file only, but callees and the columns of the tables are compiled in.
    keep(made, _SOURCES)
    return cast("_F", made)


def inner(function: _F) -> _F:
    """Return the function compiled into the code of its callers, which are compiled, too (`numba_cache.py`)."""
    return cast("_F", numba_cache.inner(function, _OPTIONS))


copy_memory: Any = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))
"""C's memcpy by addresses: target, source, number of bytes."""
