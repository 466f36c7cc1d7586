"""Compiles the simulator's functions with numba, and keeps the code on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from paceline import linked_code
from paceline.numba_cache import keep, stamp_of
from paceline.transports.bounded_loss import datagram

_F = TypeVar("_F", bound=Callable[..., Any])

# What tables' columns and a datagram's header mean is compiled in.
_SOURCES = stamp_of(
    [*Path(__file__).parent.glob("*.py"), Path(datagram.__file__), Path(linked_code.__file__)]
)

# References to arrays are not counted, so nothing can be allocated.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False}


def compiled(function: _F) -> _F:
    """Compile for callers that are compiled, too: it becomes part of their code (`linked_code.py`)."""
    return cast("_F", linked_code.inner(function, _OPTIONS))


def entry(function: _F) -> _F:
    """Compile what Python calls, when it is first called, with all that it calls."""
    made = linked_code.entry(function, _OPTIONS)
    keep(made, _SOURCES)
    return cast("_F", made)
