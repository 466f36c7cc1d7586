"""Handles of launched collectives (`Pending`): wait, with a timeout so as to poll for failures, or be called back."""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Pending(Protocol):
    """The handle of something that has been launched."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is done, or for `timeout_s` seconds; returns whether it is done. Raises what went wrong."""

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once it is done, on whichever thread notices; not at all where that cannot be known."""


# c10d's word for no time limit but the group's. Always given: a work written in Python need not have a default.
_AS_LONG_AS_IT_TAKES = timedelta(0)


class PendingWork:
    """The handle of a c10d `Work`."""

    def __init__(self, work: dist.Work) -> None:
        _outlive_works()
        self._work = work

    def wait(self, timeout_s: float | None = None) -> bool:
        if timeout_s is None:
            self._work.wait(_AS_LONG_AS_IT_TAKES)
            return True
        began_s = time.perf_counter()
        try:
            return self._work.wait(timedelta(seconds=timeout_s)) is not False
        except (RuntimeError, TimeoutError):
            if self._work.is_completed():  # just after the time limit: this says how
                self._work.wait(_AS_LONG_AS_IT_TAKES)
            elif time.perf_counter() - began_s < 0.9 * timeout_s:  # not the limit but an error
                raise
            else:
                return False
        return True

    def on_done(self, callback: Callable[[], None]) -> None:
        """As `Pending.on_done`; where a process group written in Python cannot say when it is done, never."""
        with contextlib.suppress(RuntimeError, NotImplementedError):  # torchft's future takes no callbacks
            self._work.get_future().add_done_callback(lambda _: callback())

    def future(self) -> torch.futures.Future[Any]:
        """Return the work's future, as torch's communication hooks hand it on; its value depends on the backend."""
        return self._work.get_future()


@functools.cache
def _outlive_works() -> None:
    """Let the backend's threads drop their last callbacks and tensors before the interpreter ends.

    A thread that wants Python's lock after that aborts the process (before Python 3.14).
    """
    atexit.register(time.sleep, 0.05)


class PendingFuture:
    """The handle of a communication hook's future; its value replaces the bucket's gradients."""

    def __init__(self, future: torch.futures.Future[Any], body: Tensor) -> None:
        self._future = future
        self._body = body

    def wait(self, timeout_s: float | None = None) -> bool:
        """As `Pending.wait`; a future cannot be waited for in slices, so the time limit is the process group's."""
        result = self._future.wait()
        if isinstance(result, (list, tuple)):
            result = result[0]
        if result.data_ptr() != self._body.data_ptr() or result.dtype != self._body.dtype:
            self._body.copy_(result.view(-1))
        return True

    def on_done(self, callback: Callable[[], None]) -> None:
        self._future.add_done_callback(lambda _: callback())


class Done:
    """The handle of what needed no communication."""

    def wait(self, timeout_s: float | None = None) -> bool:
        return True

    def on_done(self, callback: Callable[[], None]) -> None:
        callback()


class Chain:
    """The handle of collectives that follow each other, and of what is done locally between and after them.

    Args:
        stages: A generator that yields the handle of each, and continues, in `wait`, once that is done. So it may
            launch by what it has seen, as long as every rank launches the same.
        num_stages: How many handles it yields. `on_done` then reports when the last one is done; if the number is not
            known, when `wait` has come to the end.
    """

    def __init__(self, stages: Iterator[Pending], num_stages: int | None = None) -> None:
        self._stages = stages
        self._num_left = num_stages
        self._callbacks: list[Callable[[], None]] = []
        self._current: Pending | None = None
        self._advance()

    def _advance(self) -> None:
        """Go on to the next stage; the last one knows whom to tell."""
        self._current = next(self._stages, None)
        if self._current is not None and self._num_left is not None:
            self._num_left -= 1
        if self._current is None or self._num_left == 0:
            callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                self.on_done(callback)

    def wait(self, timeout_s: float | None = None) -> bool:
        deadline_s = None if timeout_s is None else time.perf_counter() + timeout_s
        while self._current is not None:
            left_s = None if deadline_s is None else max(deadline_s - time.perf_counter(), 1e-3)
            if not self._current.wait(left_s):
                return False
            self._advance()
        return True

    def on_done(self, callback: Callable[[], None]) -> None:
        if self._current is None:
            callback()
        elif self._num_left == 0:
            self._current.on_done(callback)
        else:
            self._callbacks.append(callback)
