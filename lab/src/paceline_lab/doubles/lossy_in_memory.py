"""`LossyMemory`: ranks of one process that sum vectors, and lose what a pattern says; for studies and tests.

It has no network and no clock: which chunks are lost follows from the pattern alone, and so is the same on every run.
What is done about them is the code that sums what came by UDP.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ProtocolError
from paceline_lossy.lossy_sums import add_survivors, lost_ranges
from paceline_lossy.lossy_transport import Bound, Losses, LossyTransport, Sum

LossPattern = Callable[[int, int, int, NDArray[Any]], NDArray[np.bool_]]
"""(collective, source, owner, magnitudes) to which of the chunks that `source` sends `owner` are lost, shape (chunks,);
`magnitudes` has the same shape: the mean absolute value of each chunk's elements."""

CHUNK_BYTES = 1432  # as in an Ethernet frame


class LossyMemory:
    """A group of ranks in this process.

    Args:
        num_ranks: Number of ranks.
        pattern: Decides which chunks are lost. Bounds are not enforced.
        chunk_bytes: Size of a chunk, which is lost or arrives as one.

    Attributes:
        transports: One a rank.
    """

    def __init__(self, num_ranks: int, pattern: LossPattern, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._pattern = pattern
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._waiting: dict[int, dict[int, Sum]] = {}
        self.transports = [_Rank(self, rank, num_ranks) for rank in range(num_ranks)]

    def join(self, collective: int, rank: int, launched: Sum) -> None:
        """Add this rank to a sum. The last rank that joins computes it for all."""
        num_ranks = len(self.transports)
        with self._lock:
            arrived = self._waiting.setdefault(collective, {})
            arrived[rank] = launched
            if len(arrived) < num_ranks:
                return
            del self._waiting[collective]
        sums = [arrived[each] for each in range(num_ranks)]
        try:
            losses = self._add(collective, sums)
        except Exception as error:  # noqa: BLE001  it is raised for those who wait
            for each in sums:
                each.end(None, error)
            return
        for each in sums:
            each.end(losses)

    def _add(self, collective: int, sums: list[Sum]) -> Losses:
        vectors = [each.vector for each in sums]
        if len({(len(vector), vector.dtype) for vector in vectors}) > 1:
            raise ProtocolError(f"ranks sum vectors of different lengths or dtypes in sum {collective}.")
        given = np.stack(vectors)
        num_ranks, size = given.shape
        per_chunk = self._chunk_bytes // given.itemsize
        shard = -(-size // num_ranks)
        result = np.empty(size, given.dtype)
        ranges = [np.empty((0, 3), np.int64)]
        expected: list[int] = []
        for owner in range(num_ranks):
            part = slice(min(size, owner * shard), min(size, (owner + 1) * shard))
            chunks = -(-(part.stop - part.start) // per_chunk)
            expected.append((num_ranks - 1) * chunks)
            missing = np.zeros((num_ranks, chunks), bool)
            for source in range(num_ranks):
                if source != owner and chunks:
                    magnitudes = _magnitudes(given[source, part], per_chunk)
                    missing[source] = self._pattern(collective, source, owner, magnitudes)
            is_scaled = sums[0].bound.is_scaled
            if chunks:
                add_survivors(
                    result[part], given[owner, part], given[:, part], ~missing, owner, per_chunk, is_scaled
                )
            ranges.append(lost_ranges(missing, part.start, part.stop, per_chunk))
        for vector in vectors:
            vector[:] = result
        return Losses(
            collective=collective,
            missing=tuple(len(of_owner) for of_owner in ranges[1:]),
            expected=tuple(expected),
            ranges=np.concatenate(ranges),
        )


def _magnitudes(values: NDArray[Any], per_chunk: int) -> NDArray[Any]:
    first = np.arange(0, len(values), per_chunk)
    sums: NDArray[Any] = np.add.reduceat(np.abs(values), first)
    return sums / np.minimum(per_chunk, len(values) - first)


class _Rank(LossyTransport):
    def __init__(self, world: LossyMemory, rank: int, num_ranks: int) -> None:
        super().__init__(rank, num_ranks)
        self._world = world
        self._num_launched = 0

    def launch(self, vector: NDArray[Any], bound: Bound) -> Sum:
        launched = Sum(vector, bound)
        collective, self._num_launched = self._num_launched, self._num_launched + 1
        self._world.join(collective, self.rank, launched)
        return launched

    @property
    def counters(self) -> dict[str, int]:
        return {}

    def close(self, timeout_s: float) -> bool:
        return True
