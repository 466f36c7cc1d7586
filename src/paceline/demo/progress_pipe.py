"""A named pipe by which ranks report to the process that shows their progress: one line of JSON a report.

Rules
1. Lines are shorter than PIPE_BUF, so the kernel keeps lines of several ranks apart and whole.
2. A rank blocks while the pipe is full: nothing is dropped, nobody polls.
3. The reader holds the pipe open for writing too: it sees no end of file when ranks come and go, and ends on its
   own empty line.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Union

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Progress:
    """How far a rank is.

    Attributes:
        rank: Who reports.
        epoch: Which epoch, from 1.
        step: Steps of this epoch that are done.
        num_steps: Steps an epoch has.
        loss: Mean loss over this rank's samples of those steps.
        samples_per_s: This rank's samples a second since the epoch began.
    """

    rank: int
    epoch: int
    step: int
    num_steps: int
    loss: float
    samples_per_s: float

    @property
    def epoch_done(self) -> bool:
        return self.step == self.num_steps


@dataclass(frozen=True)
class RankOutcome:
    """What a rank has to say at the end; times are means over steps, the first few left out.

    Attributes:
        rank: Who reports.
        samples_per_s: This rank's samples a second over all epochs.
        forward_s: The model's forward and the loss.
        backward_s: Autograd's own work in backward.
        exposed_s: Waiting for communication after autograd was done.
        optimizer_s: The optimizer's step.
        other_s: The rest: cutting the batch, clearing gradients.
        fingerprint: Digest of the final parameters' bytes.
        accuracy: On the test set; only rank 0 measures it.
    """

    rank: int
    samples_per_s: float
    forward_s: float
    backward_s: float
    exposed_s: float
    optimizer_s: float
    other_s: float
    fingerprint: str
    accuracy: float | None

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.exposed_s + self.optimizer_s + self.other_s


Message = Union[Progress, RankOutcome]  # noqa: UP007 - evaluated at run time on 3.10
_KINDS: dict[str, type[Progress | RankOutcome]] = {"progress": Progress, "outcome": RankOutcome}


class Sender:
    """A rank's end of the pipe."""

    def __init__(self, path: Path) -> None:
        self._pipe = os.open(path, os.O_WRONLY)

    def send(self, message: Message) -> None:
        """Report; returns when the line is in the pipe."""
        kind = next(kind for kind, record in _KINDS.items() if isinstance(message, record))
        line = json.dumps({"kind": kind, **dataclasses.asdict(message)}).encode() + b"\n"
        if len(line) > select.PIPE_BUF:
            raise ValueError(
                f"a message of {len(line)} bytes could be torn; the pipe keeps {select.PIPE_BUF} whole"
            )
        os.write(self._pipe, line)

    def close(self) -> None:
        os.close(self._pipe)


class Inbox:
    """The reader's end: hands every message to `receive`, on a thread of its own."""

    def __init__(self, path: Path, receive: Callable[[Message], None]) -> None:
        os.mkfifo(path)
        self._pipe = os.open(path, os.O_RDWR)
        self._receive = receive
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, name="paceline-demo-inbox", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.write(self._pipe, b"\n")  # ranks have ended by now: nothing comes after it
        self._thread.join()
        os.close(self._pipe)
        if self._error is not None and error is None:
            raise self._error

    def _read(self) -> None:
        with os.fdopen(self._pipe, "rb", closefd=False) as stream:
            for line in stream:
                if line == b"\n":
                    return
                # An error must not stop the reading: the ranks would block on a full pipe.
                try:
                    self._receive(_decode(line))
                except Exception as error:  # noqa: BLE001 - raised when the inbox closes
                    self._error = self._error or error


def _decode(line: bytes) -> Message:
    fields = json.loads(line)
    return _KINDS[fields.pop("kind")](**fields)
