"""`ResponseFuture`: the handle of what was asked of servers together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class ResponseFuture:
    """What has been asked together: a `Work`."""

    def __init__(self, num_expected: int) -> None:
        self._left = num_expected
        self._lock = threading.Lock()
        self._has_ended = threading.Event()
        self._error: Exception | None = None
        self._callbacks: list[Callable[[], None]] = []
        self.bodies: list[Any] = []
        """Of answers that were given no place."""
        if not num_expected:
            self._has_ended.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all are there, or for `timeout_s` seconds; returns whether they are. Raises what went wrong."""
        if not self._has_ended.wait(timeout_s):
            return False
        if self._error is not None:
            raise self._error
        return True

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once all are there, on the link's thread, or now."""
        with self._lock:
            if not self._has_ended.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def note(self, error: Exception | None = None) -> None:
        """One more is there, or none will come. By the link alone."""
        with self._lock:
            self._left -= 1
            if (self._left > 0 and error is None) or self._has_ended.is_set():
                return
            self._error = error
            self._has_ended.set()
            callbacks = self._callbacks
        for callback in callbacks:
            callback()
