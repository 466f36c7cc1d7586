"""One training step of a wrapped module, on one rank: what has to be known of it until it ends.

There is always exactly one under way. It ends with a synchronized backward, well or not, or is given up; then the next
one begins. What belongs to a step is a field of this object, so nothing of it is found in the next one.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.ddp.buffers import BufferSync
from paceline.observe.timings import StepTimes
from paceline.recording.sample_counts import BatchCounts


class Step:
    """Everything up to and including one synchronized backward."""

    def __init__(
        self,
        number: int,
        times: StepTimes,
        batch: BatchCounts,
        buffers: BufferSync,
        used_before: Iterable[int] = (),
    ) -> None:
        # Its number if it ends well; counts from 1
        self.number = number
        self.times = times
        self.batch = batch
        self.buffers = buffers
        self.divisor: int | None = None  # by how many ranks its sums are divided, in `join`; None: by all
        # Ids of parameters that its unsynchronized backwards have touched; they outlast a reducer
        self.used_before = set(used_before)

    def divide_by(self, divisor: int | None) -> None:
        """Divide its sums by so many ranks. Local; the same on every rank."""
        self.divisor = divisor

    def exchange_buffers(self, buffers: BufferSync) -> BufferSync:
        """Put another one in the place of its `buffers`, which are returned."""
        before, self.buffers = self.buffers, buffers
        return before
