"""What every rank's micro-batches of one step count, summed over the ranks while the first forward runs.

Rules
1. One message a step, launched before its first forward and awaited when its last backward begins: the factor is known
   before the first bucket leaves, so that a bucket is scaled once, on its way in, and half precision does not overflow
   in the sum. It has 8 bytes, 8 a rank, and 56 a rank more if shares are reported (`step_shares.py`).
2. In float64, whatever gradients are made of: counts of tokens are exact up to 2^53.
3. A rank that cannot take part says so here, so that the others raise instead of waiting for its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from paceline.comm.collectives import device_for_metadata, launch_sum
from paceline.comm.peers import Peers
from paceline.comm.pending import Done, Pending
from paceline.errors import PeerLostError

REFUSED = -1


@dataclass(frozen=True)
class StepWeights:
    """One step, over all ranks.

    Attributes:
        total: Sum of the weights of all micro-batches.
        micro_steps: How many micro-batches of positive weight each rank has; REFUSED where it could not take part.
        reports: Each rank's words on its share; empty if shares are not reported.
    """

    total: float
    micro_steps: tuple[int, ...]
    reports: tuple[tuple[float, ...], ...] = ()

    @property
    def refusing_ranks(self) -> list[int]:
        return [rank for rank, count in enumerate(self.micro_steps) if count == REFUSED]

    def factor(self, weight: float, divides_by_all: bool = True) -> float:
        """What a rank's gradients are multiplied by before the mean over ranks, if they are to count `weight`.

        Args:
            weight: Of the rank's last micro-batch, in whose units its gradients are.
            divides_by_all: Whether the mean is over all ranks, or over those with micro-batches.
        """
        num_ranks = len(self.micro_steps) if divides_by_all else sum(count > 0 for count in self.micro_steps)
        return num_ranks * weight / self.total if self.total > 0 else 0.0


class WeightExchange:
    """The sum under way.

    Args:
        weight: Of all micro-batches of this rank.
        num_micro_steps: How many it has; REFUSED if it cannot take part.
        process_group: Over whom.
        peers: For waiting.
        device: Of the module.
        report: This rank's words on its share; equally many on every rank, or none.
        on_reports: Called once, with the words of all ranks, if none of them refused.

    Contract:
        Collective: every rank, once a step.  Blocks: the constructor no, `finish` yes.
    """

    def __init__(
        self,
        weight: float,
        num_micro_steps: int,
        process_group: ProcessGroup,
        peers: Peers,
        device: torch.device,
        report: Sequence[float] = (),
        on_reports: Callable[[Sequence[Sequence[float]]], None] | None = None,
    ) -> None:
        self._peers = peers
        self._num_ranks, self._on_reports = process_group.size(), on_reports
        rank, width = process_group.rank(), len(report)
        words = [0.0] * (1 + (1 + width) * self._num_ranks)
        words[0], words[1 + rank] = weight, float(num_micro_steps)
        place = 1 + self._num_ranks + rank * width
        words[place : place + width] = report
        where = device_for_metadata(process_group, device)
        self._words = torch.tensor(words, dtype=torch.float64, device=where)
        is_alone = process_group.size() == 1
        self._pending: Pending = Done() if is_alone else launch_sum(self._words, process_group)
        self._found: StepWeights | None = None
        self._lost: PeerLostError | None = None

    def finish(self) -> StepWeights:
        """Wait for the sum.

        Raises:
            PeerLostError: A rank died or hangs.
        """
        if self._lost is not None:
            raise self._lost
        if self._found is None:
            try:
                self._peers.wait(self._pending, "learning how much the other ranks' micro-batches count")
            except PeerLostError as error:
                self._lost = error
                raise
            total, *words = self._words.tolist()
            counts, words = words[: self._num_ranks], words[self._num_ranks :]
            width = len(words) // self._num_ranks
            reports = tuple(tuple(words[at : at + width]) for at in range(0, len(words), width or 1))
            self._found = StepWeights(total, tuple(round(count) for count in counts), reports)
            if self._on_reports is not None and not self._found.refusing_ranks:
                self._on_reports(reports)
        return self._found
