"""`EpochPlan`: the steps of one epoch, as positions in its order, under a global batch that may change between steps.

Rules
1. A step takes the next samples of the order, as many as its `GlobalBatch` says: micro-step after micro-step, and rank
   after rank within one. So while only shares move, every step has the same samples whatever the shares.
2. A step depends on its own position and batch alone, never on a later change. One rank may fetch further ahead than
   another and look at a step earlier; both see the same.
3. The number of steps follows from the samples and the size of the batch, as for one process with a loader of that
   batch size. So a schedule of a fixed length fits any number of ranks. One exception: `joins`.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.data.global_batch import GlobalBatch, cut_by, num_takers


@dataclass(frozen=True)
class StepCut:
    """One step's samples, cut among the ranks.

    Attributes:
        position: Number of samples of the epoch before this step.
        micro_steps: Number of samples of each rank, by micro-step.
        tokens: Number of tokens of each rank, by micro-step; None unless shares are of tokens.
        planned: How many tokens each rank would have, if samples could be divided.
    """

    position: int
    micro_steps: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[int, ...], ...] | None = None
    planned: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """Return the number of samples over all ranks."""
        return sum(map(sum, self.micro_steps))

    @property
    def end(self) -> int:
        """Return the number of samples of the epoch before the next step."""
        return self.position + self.size

    @property
    def samples(self) -> tuple[int, ...]:
        """Return the number of samples of each rank."""
        return tuple(map(sum, zip(*self.micro_steps, strict=True)))

    def weights(self, *ranks: int) -> list[int]:
        """Return what each of the ranks' micro-batches counts, rank after rank: its samples, or its tokens."""
        counts = self.micro_steps if self.tokens is None else self.tokens
        pairs = list(zip(self.micro_steps, counts, strict=True))
        return [each[rank] for rank in ranks for sizes, each in pairs if sizes[rank]]

    def owners(self, *ranks: int) -> list[int]:
        """Return the rank that each of these micro-batches belongs to."""
        return [rank for rank in ranks for sizes in self.micro_steps if sizes[rank]]

    def parts(self, *ranks: int) -> list[tuple[int, int]]:
        """Return (first sample, number) in the order for each of these micro-batches that is not empty."""
        starts = [
            self.position + sum(map(sum, self.micro_steps[:place])) for place in range(len(self.micro_steps))
        ]
        return [
            (start + sum(sizes[:rank]), sizes[rank])
            for rank in ranks
            for start, sizes in zip(starts, self.micro_steps, strict=True)
            if sizes[rank]
        ]


class EpochPlan:
    """The global batch from each sample of an epoch on. `num_samples` is infinite while it is unknown."""

    def __init__(self, num_samples: float, drops_last: bool, start: int, batch: GlobalBatch) -> None:
        self.num_samples = num_samples
        self._drops_last = drops_last
        self._starts, self._batches = [start], [batch]

    def change(self, position: int, batch: GlobalBatch) -> None:
        """Train `batch` from sample `position` on. A step ends there, and no rank has gone beyond it."""
        while self._starts and self._starts[-1] >= position:
            self._starts.pop()
            self._batches.pop()
        self._starts.append(position)
        self._batches.append(batch)

    def batch_at(self, position: int) -> GlobalBatch:
        """Return the global batch of the step that begins there."""
        return self._batches[max(bisect.bisect_right(self._starts, position) - 1, 0)]

    def step_at(self, position: int, joins: bool = False) -> StepCut | None:
        """Return the step that begins there; None if the epoch is over.

        Samples that do not make a whole step are cut by the shares. Too few for all ranks of a further micro-step join
        the micro-step before. With `joins`, which a loop over a loader needs, too few for all ranks of a further step
        join this one.
        """
        batch = self.batch_at(position)
        left = self.num_samples - position
        if left < (batch.size if self._drops_last else 1):
            return None
        cuts: list[tuple[int, ...]] = []
        for place in range(batch.num_micro_steps):
            sizes, is_last = batch.micro_step(place), place + 1 == batch.num_micro_steps
            count = min(sum(sizes), left)
            following = batch.local if is_last else batch.micro_step(place + 1)
            extra = left - count if joins or not is_last else 0
            if extra >= num_takers(following) or self._drops_last:
                extra = 0
            parts = cut_by(sizes, int(count)), cut_by(sizes, int(extra))
            cuts.append(tuple(map(sum, zip(*parts, strict=True))))
            left -= count + extra
            if not left:
                break
        return StepCut(position, tuple(cuts))

    def steps(self, start: int, joins: bool = False) -> Iterator[StepCut]:
        """Return the steps from sample `start` on. Each is looked up when it is asked for, so that changes count."""
        while (step := self.step_at(start, joins)) is not None:
            yield step
            start = step.end
