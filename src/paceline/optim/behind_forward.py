"""Steps and exchanges of a sharded optimizer that run behind the next forward, for one model on one rank.

Rules
1. A lane of its own performs them in the order of their launch, the same on every rank, over a group of their own. So
   they keep no order with what the main thread communicates meanwhile.
2. A parameter is held from the step on until the last exchange that brings a part of it has arrived. Then reads of it
   wait, as for a gradient that is under way (`ddp.forward_overlap`). A module waits for its own parameters.
3. What has arrived in a buffer of its own is copied into the parameters on the thread that needs one of them.
4. All are completed before anything else uses the gradients' memory or the optimizer's state. So they are before the
   next backward, a saved state, another membership and the end of the program.
5. If an exchange fails, its parameters stay held, and every read raises. So a half-stepped model is not saved.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.comm.collectives import Work
from paceline.comm.lane import ContinuedWork, Lane
from paceline.comm.peers import Peers
from paceline.errors import ProtocolError

HALF_STEPPED = (
    "Some parameters may have taken this step and others not, and the lost rank's optimizer state is gone. Look at the "
    "output of the rank named here first; restart from the last checkpoint."
)
_PATIENCE_S = 1.0  # for what is under way when the model is gone


class Overlap(Protocol):
    """The forward overlap of a wrapped model, as optimizers use it."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while parameters are marked or completed."""

    @property
    def holders(self) -> Sequence[object]:
        """Return what marks and completes parameters."""

    def take_over(self, holder: Any) -> None:
        """Let this holder mark and complete parameters from now on."""

    def hold(self, parameters: Iterable[Parameter], holder: Any, index: int) -> None:
        """Make each read of these parameters call `holder.complete(index, ...)`."""

    def release(self, parameters: Iterable[Parameter]) -> None:
        """Make these ordinary parameters again."""

    def is_outstanding(self, parameter: Tensor) -> bool:
        """Return whether the parameter is held, by whichever model."""


@dataclass(frozen=True)
class Job:
    """A part of a step: what it brings, what begins it on the lane, and what ends it on the thread that needs it."""

    parameters: Sequence[Parameter]
    begin: Callable[[], Work]
    finish: Callable[[], None]


class BehindForward:
    """The jobs of one model's steps that have not been completed."""

    def __init__(self, overlap: Overlap, name: str) -> None:
        self.overlap = overlap
        self._lane = Lane(name)
        self._numbers = itertools.count()
        self._under_way: dict[int, Work] = {}  # in the order of launch
        self._held: dict[int, list[Parameter]] = {}  # by the last job that brings a part
        self._peers: Peers
        self._failure: Exception | None = None
        overlap.take_over(self)

    @classmethod
    def of(cls, overlap: Overlap, name: str) -> BehindForward:
        """Return the one of this model, which its optimizers share. Local."""
        return next((each for each in overlap.holders if isinstance(each, cls)), None) or cls(overlap, name)

    @property
    def has_outstanding(self) -> bool:
        return bool(self._under_way)

    def defer(self, jobs: Sequence[Job], peers: Peers) -> None:
        """Launch these jobs, and hold their parameters. Collective, as the jobs are; does not wait."""
        with self.overlap.lock:
            self._peers = peers
            numbered = list(zip(self._numbers, jobs, strict=False))
            last = {id(each): (number, each) for number, job in numbered for each in job.parameters}
            for number, parameter in last.values():
                self._held.setdefault(number, []).append(parameter)
            for number, _ in numbered:
                self.overlap.hold(self._held.get(number, ()), self, number)
            for number, job in numbered:
                self._under_way[number] = self._launch(job)

    def _launch(self, job: Job) -> Work:
        def begin() -> Work:
            with torch._C.DisableTorchFunctionSubclass():  # else a held parameter would wait for this job
                return job.begin()

        return ContinuedWork(self._lane, begin, [_plain(job.parameters[0])], "sharded step", job.finish)

    def complete(self, index: int, reads_gradient: bool) -> None:
        """Complete the jobs up to this one. Raises PeerLostError if a rank died or hangs."""
        for number in [number for number in self._under_way if number <= index]:
            if self._failure is not None:
                raise ProtocolError(
                    "this parameter's last step was not completed, because communication or the optimizer failed: "
                    f"{self._failure}"
                ) from self._failure
            try:
                with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                    doing = "receiving the parameters that other ranks have stepped"
                    self._peers.wait(self._under_way[number], doing, HALF_STEPPED)
            except Exception as error:
                self._failure = error
                raise
            arrived = self._held.pop(number, [])
            self.overlap.release(arrived)
            torch.autograd.graph.increment_version(arrived)
            del self._under_way[number]

    def flush(self) -> None:
        """Complete all jobs. Raises as `complete`."""
        with self.overlap.lock:
            if self._under_way:
                self.complete(max(self._under_way), reads_gradient=False)

    def close(self) -> None:
        """End the lane's thread. Local; nothing is launched any more."""
        self._lane.close(_PATIENCE_S)


def _plain(parameter: Parameter) -> Tensor:
    """Return an alias of a parameter that is held."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.detach()
