"""Compiles functions with numba, without the interpreter's lock, and copies memory by its address."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba import types

from paceline.numba_cache import renew_with, stamp_of

_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(function: _F) -> _F:
    """Compile when first called, and keep the code on disk; it runs without the interpreter's lock.

    References to arrays are not counted, so nothing can be allocated: the counting would be most of the code.
    """
    options: Any = {"nogil": True, "cache": True, "error_model": "numpy", "_nrt": False}
    made: Any = numba.njit(**options)(function)
    # numba looks at the function's own file only, but what it calls, and the columns of the tables, are compiled in.
    renew_with(made, _SOURCES)
    return cast("_F", made)


@contextmanager
def one_compiles(function: Any, at_most_s: float = 120.0) -> Iterator[None]:
    """Let one process at a time compile this function: the others then find its code on disk, instead of compiling too.

    Args:
        function: From `compiled`.
        at_most_s: After that a process compiles by itself: the one that holds the lock may have been stopped.
    """
    try:
        lock = (Path(function.stats.cache_path) / "compiling.lock").open("a")
    except (OSError, TypeError):  # nothing can be stored here
        yield
        return
    with lock:
        until_s = time.monotonic() + at_most_s
        while time.monotonic() < until_s:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.1)
        yield


_SOURCES = stamp_of(Path(__file__).parent.glob("*.py"))


copy_memory: Any = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))
"""C's memcpy by addresses: to, from, bytes."""
