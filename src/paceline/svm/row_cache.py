"""Which kernel rows are kept? Those of the samples that were needed last, as far as the budget goes.

Rules
1. A row is a sample's kernel values with this rank's active samples; its length is the number of those.
2. The rows that were asked for together are there together, even if the budget is too small for them.
3. When samples are eliminated the rows become shorter, and more of them fit.
4. A cache that is released leaves its memory, up to a limit, to the next one of this process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.svm.compiled import compact_rows

_MOST_SPARE_BYTES = 512e6
_LATELY = 3
_spare: list[NDArray[np.uint8]] = []


def _memory(num_bytes: int) -> NDArray[np.uint8]:
    """Memory of at least that size, if possible used before: touching fresh pages costs more than kernel values."""
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
        budget_bytes: How much the rows may take, unless `at_least` rows take more.
        at_least: How many rows are asked for together.
        dtype: float32 or float64.

    Attributes:
        num_evictions: Rows that had to give way so far.
        num_repeats: Rows that were asked for again after they had given way.
    """

    def __init__(
        self, num_samples: int, num_columns: int, budget_bytes: float, at_least: int, dtype: Any
    ) -> None:
        self._num_samples = num_samples
        self._at_least = at_least
        self._width = max(1, num_columns)
        itemsize = np.dtype(dtype).itemsize
        num_rows = max(at_least, int(budget_bytes // (itemsize * self._width)))
        num_rows = min(num_rows, num_samples)
        self._memory = _memory(num_rows * self._width * itemsize)
        self._flat: NDArray[Any] = self._memory[: num_rows * self._width * itemsize].view(dtype)
        self._slot_of = np.full(num_samples, -1, np.int64)
        self.num_evictions = self.num_repeats = self._clock = 0
        self._was_evicted = np.zeros(num_samples, np.bool_)
        self._forget_all()

    @property
    def rows(self) -> NDArray[Any]:
        """All rows, shape (slots, num_columns); valid until the next `compact` or `clear`."""
        return self._flat[: len(self._owner) * self._width].reshape(len(self._owner), self._width)

    def slots_for(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Places for the rows of some distinct samples.

        Args:
            ids: Global sample numbers, shape (M,).

        Returns:
            Their slots, and which of them the caller must fill now.
        """
        self._clock += 1
        slots = self._slot_of[ids]
        missing = slots < 0
        self._stamp[slots[~missing]] = self._clock
        num_missing = int(missing.sum())
        if num_missing:
            # Free slots carry the stamp -1, so they come first.
            oldest = np.argsort(self._stamp, kind="stable")[:num_missing]
            evicted = self._owner[oldest]
            evicted = evicted[evicted >= 0]
            self._slot_of[evicted] = -1
            self.num_evictions += len(evicted)
            self.num_repeats += int(self._was_evicted[ids[missing]].sum())
            self._was_evicted[evicted] = True
            self._was_evicted[ids[missing]] = False
            self._owner[oldest] = ids[missing]
            self._stamp[oldest] = self._clock
            self._slot_of[ids[missing]] = oldest
            slots[missing] = oldest
        return slots, missing

    def compact(self, keep: NDArray[np.int64]) -> None:
        """Keep only the columns `keep`, ascending, of the rows that were used lately.

        To shorten a row costs as much as to compute it again, so old rows are lost.
        """
        used = np.flatnonzero(self._stamp > self._clock - _LATELY)
        compact_rows(self._flat, self._width, used, keep)
        owner, stamp = self._owner[used], self._stamp[used]
        self._width = max(1, len(keep))
        self._forget_all()
        self._owner[: len(used)] = owner
        self._stamp[: len(used)] = stamp
        self._slot_of[owner] = np.arange(len(used))
        self._clock = int(stamp.max(initial=0))

    def clear(self, num_columns: int) -> None:
        """Forget every row; from now on a row has `num_columns` numbers."""
        self._width = max(1, num_columns)
        if self._at_least * self._width > len(self._flat):
            self._memory = np.empty(self._at_least * self._width * self._flat.itemsize, np.uint8)
            self._flat = self._memory.view(self._flat.dtype)
        self._forget_all()

    def release(self) -> None:
        """Let the next cache have the memory; this one must not be used any more."""
        if not _spare and len(self._memory) <= _MOST_SPARE_BYTES:
            _spare.append(self._memory)

    def _forget_all(self) -> None:
        num_slots = min(len(self._flat) // self._width, self._num_samples)
        self._slot_of.fill(-1)
        self._owner = np.full(num_slots, -1, np.int64)
        self._stamp = np.full(num_slots, -1, np.int64)
        self._clock = 0
