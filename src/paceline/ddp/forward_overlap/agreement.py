"""The order of pieces that all ranks keep to: measured by all, planned by rank 0, and whether it is worth it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from paceline.comm.collectives import launch_broadcast, launch_gather
from paceline.comm.peers import Peers
from paceline.ddp.bucket import Bucket
from paceline.observe import StepTiming
from paceline.planning.forward_overlap import Gain, MeasuredStep, Piece, plan, predict


@dataclass(frozen=True)
class Agreed:
    """What rank 0 said: the pieces in the order in which they are sent, and what that is predicted to save."""

    pieces: tuple[Piece, ...]
    gain: Gain


def measure(
    buckets: Sequence[Bucket], steps: Sequence[StepTiming], needed_s: Sequence[float], forward_s: float
) -> MeasuredStep:
    """Summarise this rank's last steps, which had these buckets. Local."""
    sizes = [bucket.size_bytes for bucket in buckets]
    alike = [step for step in steps if [bucket.size_bytes for bucket in step.buckets] == sizes]
    ready_s = [
        median_low([step.buckets[i].ready_s - step.started_s for step in alike]) for i in range(len(sizes))
    ]
    busy_s = min(step.communication_s for step in alike)
    return MeasuredStep(
        ready_s=tuple(max(0.0, seconds) for seconds in ready_s),
        needed_s=tuple(needed_s),
        backward_s=median_low([step.backward_s for step in alike]),
        forward_s=forward_s,
        reduced_s=median_low([step.backward_s + step.exposed_s for step in alike]),
        rate_bytes_per_s=sum(sizes) / max(busy_s, 1e-9),
    )


def agree(pieces: Sequence[Piece], mine: MeasuredStep, group: ProcessGroup, peers: Peers) -> Agreed:
    """Let rank 0 plan for the slowest rank's backward and the best rate that any has seen.

    Contract:
        Collective: every rank.  Blocks: yes.  Afterwards: the same on all ranks.
    """
    row = torch.tensor(
        [-mine.reduced_s, mine.rate_bytes_per_s, mine.backward_s, *mine.ready_s], dtype=torch.float64
    )
    rows = [torch.empty_like(row) for _ in range(group.size())]
    peers.wait(launch_gather(rows, row, group), "gathering the times of a step")
    words = torch.zeros(len(pieces) + 2, dtype=torch.float64)
    if group.rank() == 0:
        slowest = _slowest(rows, mine)
        order = plan(pieces, slowest)
        gain = predict(pieces, order, slowest)
        words = torch.tensor([gain.without_s, gain.with_s, *map(float, order)], dtype=torch.float64)
    peers.wait(launch_broadcast(words, group, source=0), "agreeing on the order of pieces")
    without_s, with_s, *order_words = words.tolist()
    return Agreed(tuple(pieces[int(place)] for place in order_words), Gain(without_s, with_s))


def _slowest(rows: Sequence[Tensor], mine: MeasuredStep) -> MeasuredStep:
    """The step whose gradients are there when the last rank's are. A rank that waits sees less of the link's rate."""
    reduced_s, rate, backward_s, *ready_s = torch.stack(list(rows)).amax(0).tolist()
    return MeasuredStep(tuple(ready_s), mine.needed_s, backward_s, mine.forward_s, -reduced_s, rate)
