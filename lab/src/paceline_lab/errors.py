"""Errors of the laboratory, below Paceline's own.

PacelineError
└── EmulationError       (also RuntimeError)   an emulated cluster could not be built, or was lost
    ├── InterruptedEmulationError              a signal ended it
    └── UnsupportedError                       this machine or user cannot emulate one, or not like this
"""

from __future__ import annotations

import signal

from paceline.errors import PacelineError


class EmulationError(PacelineError, RuntimeError):
    """An emulated cluster could not be built, or was lost; nothing of it is left."""


class InterruptedEmulationError(EmulationError):
    """A signal ended the emulation; every host, and every process on it, is gone.

    Attributes:
        signal: Number of the signal.
    """

    def __init__(self, received: signal.Signals) -> None:
        super().__init__(f"{received.name} received; every host and rank was stopped.")
        self.signal = received


class UnsupportedError(EmulationError):
    """This machine, or this user's rights, do not allow the cluster; nothing was created."""
