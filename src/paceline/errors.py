"""Every error Paceline raises on purpose.

PacelineError
├── ConfigurationError   (also ValueError)     the caller asked for something that cannot be
│   └── HookError        (also RuntimeError)   a communication hook did not keep to its contract
├── ReplicaMismatchError (also RuntimeError)   the ranks do not hold the same model
├── ProtocolError        (also RuntimeError)   the ranks stopped agreeing on what to communicate
│   ├── PeerAbortedError                       another rank gave up its backward; this one is told
│   └── CollectiveMismatchError                two ranks are not in the same collective
└── PeerLostError        (also TimeoutError)   a rank died, hung or is unreachable
"""

from __future__ import annotations


class PacelineError(Exception):
    """Root of the tree; catch it to catch everything Paceline raises on purpose."""


class ConfigurationError(PacelineError, ValueError):
    """The caller asked for something that cannot be; nothing was started."""


class HookError(ConfigurationError, RuntimeError):
    """A communication hook did not keep to its contract."""


class ReplicaMismatchError(PacelineError, RuntimeError):
    """The ranks were given different models. Raised on every rank with the same message."""


class ProtocolError(PacelineError, RuntimeError):
    """The ranks stopped agreeing on what to communicate; gradients are undefined, parameters untouched."""


class PeerAbortedError(ProtocolError):
    """Another rank abandoned its backward; the gradients of this step are undefined on every rank."""


class CollectiveMismatchError(ProtocolError):
    """Two ranks called different collectives, or one with different tensors; its result is undefined everywhere."""


class PeerLostError(PacelineError, TimeoutError, RuntimeError):
    """A peer died, hung or cannot be reached; gradients are undefined, parameters untouched."""

    def __init__(self, message: str = "", peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer
        """Its rank in the group, where it is known."""
