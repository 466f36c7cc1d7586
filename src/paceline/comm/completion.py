"""`Completion`: the handle of work that another thread ends."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Completion:
    """A `Work` that another thread ends, by `complete`."""

    def __init__(self) -> None:
        self._has_ended = threading.Event()
        self.error: Exception | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    @property
    def has_ended(self) -> bool:
        return self._has_ended.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is done, or for `timeout_s` seconds; returns whether it is done. Raises what went wrong."""
        if not self._has_ended.wait(timeout_s):
            return False
        if self.error is not None:
            raise self.error
        return True

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once it is done, on the thread that ends it, or now."""
        with self._lock:
            if not self.has_ended:
                self._callbacks.append(callback)
                return
        callback()

    def is_done(self) -> bool:
        """Return whether the work has ended, as `Work.is_done`."""
        return self.has_ended

    def failure(self) -> Exception | None:
        """Return the error, as `Work.failure`; it is set before callbacks are called."""
        return self.error

    def complete(self, error: Exception | None = None) -> None:
        """Wake up all waiters. A second call changes nothing."""
        with self._lock:
            if self.has_ended:
                return
            self.error = error
            self._has_ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
