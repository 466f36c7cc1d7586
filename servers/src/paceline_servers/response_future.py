"""`ResponseFuture`: the handle of what was asked of servers together."""

from __future__ import annotations

import threading
from typing import Any

from paceline.comm import Completion


class ResponseFuture(Completion):
    """What has been asked together: a `Work`, which ends on the link's thread."""

    def __init__(self, num_expected: int) -> None:
        super().__init__()
        self._left = num_expected
        self._counting = threading.Lock()
        self.bodies: list[Any] = []
        """Of answers that were given no place."""
        if not num_expected:
            self.complete()

    def note(self, error: Exception | None = None) -> None:
        """One more is there, or none will come. By the link alone."""
        with self._counting:
            self._left -= 1
            is_over = self._left <= 0 or error is not None
        if is_over:
            self.complete(error)
