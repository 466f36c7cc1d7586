"""What a rank that is behind, or has just come, receives from one that is not; and when it takes that.

Rules
1. It is received into memory of its own, and taken over only when all of it is there. So a rank whose giver dies
   meanwhile has what it had.
2. Numbers travel as JSON, tensors as they are. Nothing is unpickled.
3. Schedules are loaded, not stepped: to step one as often gives other bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module
from torch.optim import Optimizer

from paceline.comm.collectives import all_gather, broadcast
from paceline.data import GlobalBatch, GlobalShuffle
from paceline.elastic.rollback import Randomness
from paceline.elastic.state_tree import PackedState, empty_tensors, pack, unpack


@dataclass(frozen=True)
class Place:
    """Where training stands."""

    step: int  # steps that have been completed
    epoch: int  # of the data, for the next step
    position: int  # samples of it before that step


@dataclass(frozen=True)
class Standings:
    """How many steps each rank of a group has completed."""

    steps: tuple[int, ...]

    @classmethod
    def of(cls, step: int, group: ProcessGroup) -> Standings:
        """Tell each other. Collective; blocks."""
        row = torch.tensor([step])
        rows = [torch.empty_like(row) for _ in range(group.size())]
        all_gather(rows, row, group).wait()
        return cls(tuple(int(each.item()) for each in rows))

    @property
    def holder(self) -> int:
        """The first rank that is furthest."""
        return self.steps.index(max(self.steps))

    @property
    def are_equal(self) -> bool:
        return len(set(self.steps)) == 1


class Carried:
    """What training has made on this rank: module, optimizers, others with a `state_dict`, the sampler's place."""

    def __init__(
        self, module: Module, optimizers: Sequence[Optimizer], others: Sequence[Any], sampler: GlobalShuffle
    ) -> None:
        self._module, self._optimizers, self._others = module, optimizers, others
        self._sampler = sampler

    def packed(self, place: Place, batch: GlobalBatch) -> PackedState:
        """All of it, for another rank, between two steps. Local. `batch` is what the job began with."""
        return pack(
            {
                "place": [place.step, place.epoch, place.position],
                "batch": batch.as_dict(),
                "sampler": dict(self._sampler.state_dict()),
                "randomness": Randomness().as_tree(),
                "model": self._tensors(),
                "optimizers": [each.state_dict() for each in self._optimizers],
                "others": [each.state_dict() for each in self._others],
            }
        )

    def _tensors(self) -> list[Tensor]:
        return [each.detach() for each in (*self._module.parameters(), *self._module.buffers())]

    def take(self, tree: Any, *, is_new: bool) -> None:
        """Be where the giver was; `is_new`: with its random numbers, which a rank a step behind has drawn. Local."""
        with torch.no_grad():
            for mine, given in zip(self._tensors(), tree["model"], strict=True):
                mine.copy_(given)
        for kind, states in ((self._optimizers, tree["optimizers"]), (self._others, tree["others"])):
            for each, state in zip(kind, states, strict=True):
                each.load_state_dict(state)
        if is_new:
            state = tree["sampler"]
            self._sampler.load_state_dict(state, batch_may_change="tokens" not in state)
            Randomness.from_tree(tree["randomness"]).restore()


def send_words(words: bytes | None, holder: int, group: ProcessGroup) -> bytes:
    """Give all ranks the words of rank `holder`. Collective; blocks."""
    length = torch.tensor([len(words or b"")])
    broadcast(length, group, holder).wait()
    if words is not None:
        text = torch.frombuffer(bytearray(words), dtype=torch.uint8)
    else:
        text = torch.empty(int(length.item()), dtype=torch.uint8)
    broadcast(text, group, holder).wait()
    return text.numpy().tobytes()


def tensors_for(words: bytes, packed: PackedState | None) -> list[Tensor]:
    """Those to be sent, on the rank that has them; room for them elsewhere."""
    return empty_tensors(words) if packed is None else packed.tensors


def whole(words: bytes, tensors: list[Tensor]) -> Any:
    """The tree, once all has arrived."""
    return unpack(PackedState(words, tensors))
