"""Compiles the simulator's functions with numba, and keeps the code on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

from paceline.numba_cache import renew_with, stamp_of

_F = TypeVar("_F", bound=Callable[..., Any])

# Columns of tables are constants of another file and are compiled in: any edited file makes all code old.
_SOURCES = stamp_of(Path(__file__).parent.glob("*.py"))


# References to arrays are not counted, so nothing can be allocated.
_OPTIONS: Any = {"nogil": True, "error_model": "numpy", "_nrt": False}


def compiled(function: _F) -> _F:
    """Compile for callers that are compiled, too: without what Python would need to call it, which takes most of it."""
    return cast("_F", numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **_OPTIONS)(function))


def entry(function: _F) -> _F:
    """Compile what Python calls, when it is first called, with all that it calls."""
    made: Any = numba.njit(cache=True, no_cfunc_wrapper=True, **_OPTIONS)(function)
    renew_with(made, _SOURCES)
    return cast("_F", made)
