"""Every error Paceline raises on purpose.

PacelineError
├── ConfigurationError   (also ValueError)     the caller asked for something that cannot be
│   └── HookError        (also RuntimeError)   a communication hook did not keep to its contract
├── ReplicaMismatchError (also RuntimeError)   the ranks do not hold the same model
├── ProtocolError        (also RuntimeError)   the ranks stopped agreeing on what to communicate
│   ├── StepDroppedError                       this step's gradients are gone; training may go on
│   │   ├── PeerAbortedError                   another rank gave up its backward; this one is told
│   │   │   └── PeerOutOfMemoryError           ... because it ran out of memory
│   │   └── SkipError                          ranks skip different layers, or one that is used
│   └── CollectiveMismatchError                two ranks are not in the same collective
└── PeerLostError        (also TimeoutError)   a rank died, hung or is unreachable
    └── ServerLostError                        a parameter server did
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Iterator

SHOWN_AFTER_S = 5.0  # seconds that an error waits for other ranks before it is shown


def forget_frames(error: BaseException | None) -> None:
    """Clear the frames of a handled error and of its causes, so that they keep no tensors and no groups alive.

    Frames that still run are left as they are, and so are the messages.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


@contextlib.contextmanager
def shown_if_it_waits(error: BaseException, rank: int) -> Iterator[None]:
    """Print an error to stderr if the block takes long, in which this rank waits for others before it raises it.

    The others may wait for this rank meanwhile, until the process group's timeout.
    """

    def show() -> None:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        head = f"rank {rank} has raised an exception and waits for the other ranks to end this step:\n"
        sys.stderr.write(head + "".join(lines))

    timer = threading.Timer(SHOWN_AFTER_S, show)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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


class StepDroppedError(ProtocolError):
    """This step's gradients were dropped; parameters are untouched, and training may go on with the next step."""


class PeerAbortedError(StepDroppedError):
    """Another rank abandoned its backward; the gradients of this step are undefined on every rank."""


class PeerOutOfMemoryError(PeerAbortedError):
    """Ranks abandoned a backward because they ran out of memory; gradients are undefined, parameters untouched."""

    def __init__(self, message: str = "", ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks  # the same on every rank


class SkipError(StepDroppedError):
    """The ranks skip different layers, or one of them uses what it skips; this step's gradients were dropped.

    Parameters are untouched, and training may go on with the next step.
    """


class CollectiveMismatchError(ProtocolError):
    """Two ranks called different collectives, or the same one with different tensors. No rank's result is defined."""


class PeerLostError(PacelineError, TimeoutError, RuntimeError):
    """A peer died, hung or cannot be reached; gradients are undefined, parameters untouched."""

    def __init__(self, message: str = "", peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer
        """Its rank in the group, where it is known."""


class DeviceLostError(PacelineError, RuntimeError):
    """This process's device fails for good since a peer died; the process has to end, and counts as lost."""


class ServerLostError(PeerLostError):
    """A parameter server died, hung or cannot be reached; what lived on it alone is lost."""
