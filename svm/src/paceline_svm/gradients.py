"""Gradient updates by kernel rows of the coefficients that changed: computed, or from an LRU cache of rows.

Rules
1. Memory is not touched before a row is written to it, and a fit leaves its memory to the next one. Touching fresh
   pages takes longer than computing a row.
2. A row for which there is no room is used while it is computed, and not kept.
3. Every miss on an evicted row lets the cache grow by one row, up to the limit. So it grows to the rows that come back,
   the support vectors', and not before. Room for them is set aside at the start, untouched.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline_svm.compiled import compiled
from paceline_svm.problem import Active, Problem
from paceline_svm.sample_forms import Samples

_SINGLE_TOL = 1e-4
_SINGLE_EXPONENT = 1e4
_SAFETY = 4.0  # so single precision up to C = 2,000 for a tol of 0.001


def rows_dtype(problem: Problem, tol: float) -> np.dtype[Any]:
    """Single precision where a Gaussian kernel is well scaled, and neither `tol` small nor coefficients large.

    A gradient errs by an epsilon for each unit of a coefficient: where that is near `tol`, pair updates go round in
    circles. Alike on all ranks.
    """
    kernel = problem.kernel
    exponent = kernel.gamma * problem.extent.largest_square
    largest = float(np.maximum(problem.upper, -problem.lower).max(initial=0.0))
    error = _SAFETY * float(np.finfo(np.float32).eps) * largest
    is_double = kernel.name != "rbf" or tol < _SINGLE_TOL or exponent > _SINGLE_EXPONENT or error > tol
    return np.dtype(np.float64 if is_double else np.float32)


class Gradients:
    """Adds kernel rows to the active gradients, and keeps the rows for the next time.

    Args:
        problem: This rank's part.
        cache_bytes: For kernel rows, at first and at most.
        dtype: Of kernel rows.

    Attributes:
        num_kernel_values: Kernel values computed so far.
    """

    def __init__(self, problem: Problem, cache_bytes: tuple[float, float], dtype: Any) -> None:
        self._problem, self._cache_bytes = problem, cache_bytes
        self._rows = self._new_cache(dtype)
        self._evictions = 0
        self.num_kernel_values = 0

    def _new_cache(self, dtype: Any) -> RowCache:
        least, most = self._cache_bytes
        return RowCache(self._problem.num_samples, len(self._problem.samples), least, dtype, most)

    def is_short_of_memory(self, num_support: int) -> bool:
        """Return whether shrinking samples pays.

        Bringing them back will cost about a kernel row for each support vector. With room for less than half of those
        rows, as many will be computed again in an iteration or two. Otherwise it is as with renting or buying skis:
        wait until that many were computed again, which at worst is twice the best choice.
        """
        return self._rows.most_rows < num_support / 2 or self._rows.num_repeats > num_support

    @property
    def num_evictions(self) -> int:
        """Return the number of rows that gave way to others."""
        return self._evictions + self._rows.num_evictions

    def add(self, active: Active, panel: Samples, change: NDArray[np.float64]) -> None:
        """Add kernel rows times changes to the active gradients.

        Args:
            active: Its `g` grows.
            panel: The samples whose coefficients changed, each once, in the precision of kernel rows.
            change: By how much, shape (len(panel),).
        """
        slots, missing = self._rows.slots_for(panel.ids)
        known = ~missing
        add_rows(self._rows.rows, slots[known], change[known], active.g)
        new = np.flatnonzero(missing)
        if len(new):
            self._problem.kernel.add_rows(
                panel.take(new), active.samples, self._rows.rows, slots[new], change[new], active.g
            )
            self.num_kernel_values += len(new) * len(active)

    def compact(self, keep: NDArray[np.int64]) -> None:
        """Some active samples are left, at these positions; rows used lately stay."""
        self._rows.compact(keep)

    def clear(self, num_active: int) -> None:
        """Forget the rows, because the active samples have changed."""
        self._rows.clear(num_active)

    def use(self, dtype: Any) -> None:
        """Kernel rows have another precision from now on; all samples are active."""
        self.release()
        self._evictions += self._rows.num_evictions
        self._rows = self._new_cache(dtype)

    def release(self) -> None:
        """Leave the cache's memory to the next fit."""
        self._rows.release()


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
        """Return all rows, shape (slots, num_columns); valid until the next `compact` or `clear`."""
        return self._flat[: len(self._owner) * self._width].reshape(len(self._owner), self._width)

    @property
    def most_rows(self) -> int:
        """Return the largest number of rows that the cache may hold in the end."""
        return min(len(self._flat) // self._width, self._num_samples)

    def slots_for(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return places for the rows of some distinct samples.

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
        """Return up to `num` slots: free ones first, then those unused for longest, but none in use now."""
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
