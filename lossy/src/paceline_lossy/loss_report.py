"""Reports the losses of a step under bounded loss: counts by rank and bucket, a fraction by parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline_lossy import Losses


@dataclass(frozen=True)
class LossReport:
    """The losses of one step. A contribution is one datagram of a rank's gradient, sent for another rank's shard.

    Attributes:
        lost: Contributions that did not arrive, over all ranks and buckets.
        sent: Contributions that were sent for the first time.
        by_rank: Lost contributions for the shard of each rank; if servers sum, of each server.
        by_sender: Lost contributions that each rank sent. A rank whose link is bad stands out here, and the others
            share its losses in `by_rank`.
        by_bucket: Lost contributions of each bucket, in launch order.
        by_parameter: The lost part of each parameter's elements, over all ranks' contributions to others.
    """

    lost: int = 0
    sent: int = 0
    by_rank: tuple[int, ...] = ()
    by_sender: tuple[int, ...] = ()
    by_bucket: tuple[int, ...] = ()
    by_parameter: Mapping[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Return the lost contributions divided by the sent ones."""
        return self.lost / self.sent if self.sent else 0.0

    @classmethod
    def of(
        cls, buckets: Sequence[tuple[Losses, Mapping[str, int]]], num_ranks: int, num_senders: int
    ) -> LossReport:
        """Return the report of a step.

        Args:
            buckets: The losses of each bucket and its parameters' numbers of elements, both in launch order.
            num_ranks: Number of ranks.
            num_senders: Number of ranks that send each element to the rank or server that sums it.
        """
        by_rank = [sum(missing) for missing in zip(*(losses.missing for losses, _ in buckets), strict=True)]
        by_sender = np.zeros(num_ranks, np.int64)
        parts: dict[str, float] = {}
        for losses, sizes in buckets:
            by_sender += np.bincount(losses.ranges[:, 0], minlength=num_ranks)
            parts |= _parts(losses, sizes, num_senders)
        return cls(
            lost=sum(by_rank),
            sent=sum(sum(losses.expected) for losses, _ in buckets),
            by_rank=tuple(by_rank),
            by_sender=tuple(by_sender.tolist()),
            by_bucket=tuple(sum(losses.missing) for losses, _ in buckets),
            by_parameter=parts,
        )


def _parts(losses: Losses, sizes: Mapping[str, int], num_senders: int) -> dict[str, float]:
    """Return the lost fraction of each parameter of a bucket."""
    found: dict[str, float] = {}
    start = 0
    for name, size in sizes.items():
        first, end = losses.ranges[:, 1], losses.ranges[:, 2]
        overlap = np.minimum(end, start + size) - np.maximum(first, start)
        found[name] = float(overlap[overlap > 0].sum()) / max(1, size * num_senders)
        start += size
    return found
