"""LRU cache of kernel rows of working sets with the active samples, within a memory budget.

Rules
1. Memory is not touched before a row is written to it, and a fit leaves its memory to the next one: to touch fresh
   pages takes longer than to compute what goes there.
2. A row for which there is no room is used while it is computed, and not kept.
3. Each row that is computed again for want of room makes room for one more, up to a limit: then the cache grows to the
   rows that come back, the support vectors', and not before. Room for them is set aside at the start, untouched.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline_svm.compiled import compiled

_MOST_SPARE_BYTES = 512e6
_LATELY = 3
_spare: list[NDArray[np.uint8]] = []


def _memory(num_bytes: int) -> NDArray[np.uint8]:
    """Memory of at least that size, if possible used before."""
    while _spare:
        spare = _spare.pop()
        if len(spare) >= num_bytes:
            return spare
    return np.empty(num_bytes, np.uint8)


class RowCache:
    """Kernel rows by sample.

    Args:
        num_samples: Of the whole problem, over all ranks.
        num_columns: Active samples of this rank.
        budget_bytes: How much the rows may take at first.
        dtype: float32 or float64.
        most_bytes: How much they may take in the end, if that is more.

    Attributes:
        num_evictions: Rows that had to give way so far.
        num_repeats: Rows that were computed again for want of room.
    """

    def __init__(
        self, num_samples: int, num_columns: int, budget_bytes: float, dtype: Any, most_bytes: float = 0.0
    ) -> None:
        self._num_samples = num_samples
        self._width = max(1, num_columns)
        itemsize = np.dtype(dtype).itemsize
        num_rows = min(int(max(budget_bytes, most_bytes) // (itemsize * self._width)), num_samples)
        num_bytes = num_rows * self._width * itemsize
        self._memory = _memory(num_bytes)
        self._num_allowed = int(budget_bytes // itemsize)  # numbers that the rows may have by now
        self._num_touched = 0
        self._owner: NDArray[np.int64]
        self._stamp: NDArray[np.int64]
        self._flat: NDArray[Any] = self._memory[:num_bytes].view(dtype)
        self._slot_of = np.full(num_samples, -1, np.int64)
        self.num_evictions = self.num_repeats = 0
        self._num_used = 0
        self._clock = 0
        self._was_computed = np.zeros(num_samples, np.bool_)
        self._forget_all()

    @property
    def rows(self) -> NDArray[Any]:
        """All rows, shape (slots, num_columns); valid until the next `compact` or `clear`."""
        return self._flat[: len(self._owner) * self._width].reshape(len(self._owner), self._width)

    @property
    def most_rows(self) -> int:
        """How many rows there may be in the end."""
        return min(len(self._flat) // self._width, self._num_samples)

    def slots_for(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Places for the rows of some distinct samples.

        Args:
            ids: Global sample numbers, shape (M,).

        Returns:
            Their slots, -1 where there is no room, and which of them the caller must compute now.
        """
        self._clock += 1
        slots = self._slot_of[ids]
        missing = slots < 0
        self._stamp[slots[~missing]] = self._clock
        new = np.flatnonzero(missing)
        if len(new):
            self._grow(int(self._was_computed[ids[new]].sum()))
            self._was_computed[ids[new]] = True
            places = self._places(len(new))
            new = new[: len(places)]
            self._owner[places] = ids[new]
            self._stamp[places] = self._clock
            self._slot_of[ids[new]] = places
            slots[new] = places
        return slots, missing

    def _grow(self, num_repeats: int) -> None:
        """So many rows are computed again: make room for as many more, if there may be more."""
        self.num_repeats += num_repeats
        self._num_allowed += num_repeats * self._width
        more = np.full(self._num_slots() - len(self._owner), -1, np.int64)
        if len(more):
            self._owner, self._stamp = np.append(self._owner, more), np.append(self._stamp, more)

    def _num_slots(self) -> int:
        return min(self._num_allowed // self._width, self.most_rows)

    def _places(self, num: int) -> NDArray[np.int64]:
        """Up to `num` slots, free ones first, then those that were not used longest, but none of this moment."""
        num_free = min(num, len(self._owner) - self._num_used)
        places = np.arange(self._num_used, self._num_used + num_free)
        self._num_used += num_free
        self._num_touched = max(self._num_touched, self._num_used * self._width)
        if num_free == num:
            return places
        old = np.flatnonzero(self._stamp < self._clock)
        old = old[self._owner[old] >= 0]
        old = old[np.argsort(self._stamp[old], kind="stable")[: num - num_free]]
        self._slot_of[self._owner[old]] = -1
        self.num_evictions += len(old)
        return np.concatenate([places, old])

    def compact(self, keep: NDArray[np.int64]) -> None:
        """Keep only the columns `keep`, ascending, of the rows that were used lately.

        To shorten a row costs as much as to compute it again, so old rows are lost.
        """
        used = np.flatnonzero((self._stamp > self._clock - _LATELY) & (self._owner >= 0))
        compact_rows(self._flat, self._width, used, keep)
        owner, stamp, clock = self._owner[used], self._stamp[used], self._clock
        self._width = max(1, len(keep))
        self._forget_all()
        self._owner[: len(used)] = owner
        self._stamp[: len(used)] = stamp
        self._slot_of[owner] = np.arange(len(used))
        self._num_used, self._clock = len(used), clock

    def clear(self, num_columns: int) -> None:
        """Forget every row; from now on a row has `num_columns` numbers."""
        self._width = max(1, num_columns)
        self._forget_all()

    def release(self) -> None:
        """Let the next cache have the memory; this one must not be used any more."""
        if not _spare and self._num_touched * self._flat.itemsize <= _MOST_SPARE_BYTES:
            _spare.append(self._memory)

    def _forget_all(self) -> None:
        num_slots = self._num_slots()
        self._slot_of.fill(-1)
        self._owner = np.full(num_slots, -1, np.int64)
        self._stamp = np.full(num_slots, -1, np.int64)
        self._num_used = 0
        self._clock = 0


@compiled
def add_rows(
    rows: NDArray[Any], slots: NDArray[np.int64], factors: NDArray[np.float64], total: NDArray[np.float64]
) -> None:
    """Add sum_k factors[k] * rows[slots[k], :N] to `total`, shape (N,), in double precision."""
    N = len(total)
    M = len(slots)
    width = 4096
    for t0 in range(0, N, width):
        L = width if width < N - t0 else N - t0
        o = total[t0 : t0 + L]
        k = 0
        while k + 4 <= M:
            a, b = rows[slots[k], t0 : t0 + L], rows[slots[k + 1], t0 : t0 + L]
            c, d = rows[slots[k + 2], t0 : t0 + L], rows[slots[k + 3], t0 : t0 + L]
            u, v, w, x = factors[k], factors[k + 1], factors[k + 2], factors[k + 3]
            for t in range(L):
                o[t] += u * a[t] + v * b[t] + w * c[t] + x * d[t]
            k += 4
        while k < M:
            a = rows[slots[k], t0 : t0 + L]
            u = factors[k]
            for t in range(L):
                o[t] += u * a[t]
            k += 1


@compiled
def compact_rows(
    flat: NDArray[Any], old_width: int, slots: NDArray[np.int64], keep: NDArray[np.int64]
) -> None:
    """Move rows to the front of `flat`, and of each keep only some columns.

    Args:
        flat: Rows of `old_width` numbers end to end; afterwards row i is old row slots[i], len(keep) numbers wide.
        old_width: Numbers a row.
        slots: Rows to keep, ascending, shape (M,).
        keep: Columns to keep, ascending.
    """
    width = len(keep)
    for i in range(len(slots)):
        source = slots[i] * old_width
        target = i * width
        for j in range(width):
            flat[target + j] = flat[source + keep[j]]
