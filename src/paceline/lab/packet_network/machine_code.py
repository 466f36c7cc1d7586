"""Compiles the simulator's functions with numba, and keeps the code on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

from paceline.numba_cache import keep, stamp_of
from paceline.transports.bounded_loss import datagram

_F = TypeVar("_F", bound=Callable[..., Any])

# What tables' columns and a datagram's header mean is compiled in.
_SOURCES = stamp_of([*Path(__file__).parent.glob("*.py"), Path(datagram.__file__)])

# References to arrays are not counted, so nothing can be allocated.
_ENTRY: Any = {"nogil": True, "error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True, "cache": True}
_INNER: Any = _ENTRY | {"cache": False, "no_cpython_wrapper": True}


def compiled(function: _F) -> _F:
    """Compile for callers that are compiled, too: without what Python would need to call it, a fifth of it."""
    return cast("_F", numba.njit(**_INNER)(function))


def entry(function: _F) -> _F:
    """Compile what Python calls, when it is first called, with all that it calls."""
    made: Any = numba.njit(**_ENTRY)(function)
    keep(made, _SOURCES)
    return cast("_F", made)
