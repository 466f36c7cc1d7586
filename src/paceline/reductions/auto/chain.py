"""Reductions one after another, as one that is waited for in slices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from paceline.comm.pending import Pending


class Chain:
    """What a generator launches: it goes on when what it has yielded last is done.

    So it may look at a clock before and after each, and launch by what it has seen, as long as every rank launches the
    same.

    Args:
        stages: Yields what has been launched.
        first: What the chain is about: who asks when it is done is told when this is.
    """

    def __init__(self, stages: Iterator[Pending], first: Pending) -> None:
        self._stages = stages
        self._first = first
        self._current: Pending | None = next(stages)

    def wait(self, timeout_s: float | None = None) -> bool:
        deadline_s = None if timeout_s is None else time.perf_counter() + timeout_s
        while self._current is not None:
            left_s = None if deadline_s is None else max(deadline_s - time.perf_counter(), 1e-3)
            if not self._current.wait(left_s):
                return False
            self._current = next(self._stages, None)
        return True

    def on_done(self, callback: Callable[[], None]) -> None:
        self._first.on_done(callback)
