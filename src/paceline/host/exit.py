"""Ends threads before the interpreter ends. A process that is forked from this one ends nothing of its parent's.

Rules
1. A daemon thread that comes back from C++ into an interpreter that is ending aborts the process (before Python 3.14).
   So threads are ended before.
2. A process forked from a rank (a worker of a DataLoader, os.fork) has the rank's objects, but not its threads. It
   shares the rank's sockets and memory. It neither waits for those threads, nor tells other ranks that this one has
   left.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

GRACE_S = 1.0  # for all together; what waits for a lost peer does not hold up the end

_endings: weakref.WeakKeyDictionary[Any, Callable[[Any, float], object]] = weakref.WeakKeyDictionary()


def end_before_exit(owner: Any, end: Callable[[Any, float], object]) -> None:
    """Call `end(owner, seconds left)` before the interpreter ends, if `owner` lives; not in a forked process."""
    _endings[owner] = end


@atexit.register
def _end_all() -> None:
    until_s = time.monotonic() + GRACE_S
    for owner, end in list(_endings.items()):
        end(owner, max(0.0, until_s - time.monotonic()))


def keep_for_ever(owner: object) -> None:
    """Never destroy `owner`, not even as the interpreter ends: its destructor would wait for missing threads."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


def _forget_parents() -> None:
    """Drop Paceline's endings and finalizers (`weakref.finalize`) in a forked process (rule 2)."""
    _endings.clear()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # no other way to list them
        found = finalizer.peek()
        if found is not None and str(getattr(found[1], "__module__", "")).startswith("paceline."):
            finalizer.detach()


os.register_at_fork(after_in_child=_forget_parents)
