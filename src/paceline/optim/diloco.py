"""`DiLoCo`: hundreds of steps on each rank alone; then an outer optimizer takes the mean change for a gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from paceline.compression import Compressor
from paceline.errors import ConfigurationError
from paceline.numbers_given import number
from paceline.optim.flat_parameters import FlatParameters
from paceline.optim.local_steps import LocalSGD
from paceline.reductions import Reduction


class DiLoCo(LocalSGD):
    """Steps `optimizer` on this rank's gradients; every `every` steps Nesterov SGD on the mean change.

    With d the mean over ranks of how parameters changed since the last synchronization, w where they then were, and m
    the outer momentum:

        v = m v + d
        w = w + outer_lr (d + m v)           (with nesterov=False: w + outer_lr v)

    With `outer_lr=1` and `outer_momentum=0` it is LocalSGD.

    Limits first: nothing overlaps with backward; three copies of the parameters are kept. The inner optimizer's state
    is each rank's own and survives synchronizations.

    Args:
        optimizer: The inner one; the paper has AdamW.
        every: Steps between two synchronizations; the paper has 500.
        outer_lr: The paper's best is 0.7.
        outer_momentum: The paper's best is 0.9.
        nesterov: Look ahead along the outer momentum.
        process_group: Over whom; None for the default group.
        buffers: Averaged with the parameters, as for LocalSGD.
        compression: Send fewer bytes for the changes, as for `DistributedDataParallel`.

    Contract, Raises:
        As LocalSGD.

    Source:
        Douillard et al.: "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105,
        algorithm 1.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        process_group: ProcessGroup | None = None,
        buffers: Iterable[Tensor] = (),
        compression: Compressor | Reduction | str | None = None,
    ) -> None:
        if not (0 < number(outer_lr) < math.inf and 0 <= number(outer_momentum) < 1):
            raise ConfigurationError(
                f"DiLoCo: outer_lr={outer_lr!r} and outer_momentum={outer_momentum!r}: a rate is positive and finite, "
                "a momentum at least 0 and less than 1. The paper has 0.7 and 0.9."
            )
        self.outer_lr, self.outer_momentum, self.nesterov = outer_lr, outer_momentum, nesterov
        self._velocities: list[Tensor] = []
        super().__init__(optimizer, every, process_group, buffers, compression)

    def _settings(self) -> str:
        outer = f"outer_lr={self.outer_lr}, outer_momentum={self.outer_momentum}, nesterov={self.nesterov}"
        return f"{super()._settings()}, {outer}"

    def _adopt(self) -> None:
        super()._adopt()
        self._velocities = [torch.zeros_like(flat.kept) for flat in self._flats]

    def _move(self, index: int, flat: FlatParameters) -> None:
        change, velocity = flat.update, self._velocities[index]
        velocity.mul_(self.outer_momentum).add_(change)
        if self.nesterov:
            change.add_(velocity, alpha=self.outer_momentum)
        else:
            change.copy_(velocity)
        change.mul_(self.outer_lr)

    def _memories(self) -> list[Tensor]:
        return self._velocities
