"""Ends threads before the interpreter ends.

A daemon thread that comes back from C++ into an interpreter that is ending aborts the process (before Python 3.14).
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

GRACE_S = 1.0  # for all together; what waits for a lost peer does not hold up the end

_endings: WeakKeyDictionary[Any, Callable[[Any, float], object]] = WeakKeyDictionary()


def end_before_exit(owner: Any, end: Callable[[Any, float], object]) -> None:
    """Call `end(owner, seconds left)` when the interpreter is about to end, if `owner` is still there."""
    _endings[owner] = end


@atexit.register
def _end_all() -> None:
    until_s = time.monotonic() + GRACE_S
    for owner, end in list(_endings.items()):
        end(owner, max(0.0, until_s - time.monotonic()))
