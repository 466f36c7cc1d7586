"""Compiles functions with numba, without the interpreter's lock, and copies memory by its address."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import types

from paceline import linked_code
from paceline.numba_cache import keep, stamp_of

_F = TypeVar("_F", bound=Callable[..., Any])


_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False}
_SOURCES = stamp_of([Path(linked_code.__file__), *Path(__file__).parent.glob("*.py")])


def compiled(function: _F) -> _F:
    """Compile when first called, and keep the code on disk; it runs without the interpreter's lock.

    References to arrays are not counted, so nothing can be allocated: the counting would be most of the code.
    """
    made = linked_code.entry(function, _OPTIONS)
    # numba looks at the function's own file only, but what it calls, and the columns of the tables, are compiled in.
    keep(made, _SOURCES)
    return cast("_F", made)


def inner(function: _F) -> _F:
    """As `compiled`, for what only compiled code calls: it becomes part of its callers' code (`linked_code.py`)."""
    return cast("_F", linked_code.inner(function, _OPTIONS))


copy_memory: Any = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))
"""C's memcpy by addresses: to, from, bytes."""
