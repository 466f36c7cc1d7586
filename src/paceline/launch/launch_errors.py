"""The errors with which a launch ends."""

from __future__ import annotations

import signal

from paceline.errors import PacelineError


class LaunchError(PacelineError, RuntimeError):
    """The launch failed, or one of its ranks did; every rank has been stopped."""


class InterruptedLaunchError(PacelineError, RuntimeError):
    """This `signal` asked the launcher to stop; every rank has been stopped."""

    def __init__(self, message: str, received: signal.Signals) -> None:
        super().__init__(message)
        self.signal = received
