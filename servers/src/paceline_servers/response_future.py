"""`ResponseFuture`: the future of requests to several servers."""

from __future__ import annotations

import threading
from typing import Any

from paceline.comm import Completion


class ResponseFuture(Completion):
    """The future of several requests: a `Work` that completes on the link's thread."""

    def __init__(self, num_expected: int) -> None:
        super().__init__()
        self._left = num_expected
        self._counting = threading.Lock()
        self.bodies: list[Any] = []
        """The bodies of answers that were given no memory."""
        if not num_expected:
            self.complete()

    def note(self, error: Exception | None = None) -> None:
        """Count one answer, or fail with an error. Called by the link only."""
        with self._counting:
            self._left -= 1
            is_over = self._left <= 0 or error is not None
        if is_over:
            self.complete(error)
