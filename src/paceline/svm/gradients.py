"""Gradients follow the coefficients: kernel rows of what changed, from the cache, computed, or on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.svm.accelerator import RowsOnDevice, device_for
from paceline.svm.active import Active
from paceline.svm.problem import Problem
from paceline.svm.row_cache import RowCache
from paceline.svm.row_loops import add_rows
from paceline.svm.samples import Samples


class Gradients:
    """Adds kernel rows to the active gradients, and keeps the rows for the next time.

    Args:
        problem: This rank's part.
        cache_bytes: For kernel rows.
        dtype: Of kernel rows.

    Attributes:
        num_kernel_values: Kernel values computed so far.
    """

    def __init__(self, problem: Problem, cache_bytes: float, dtype: Any) -> None:
        self._problem, self._cache_bytes = problem, cache_bytes
        self._device = device_for(problem.kernel, problem.samples)
        self._on_device: tuple[Samples, RowsOnDevice] | None = None  # of which samples
        self._rows = self._new_cache(dtype)
        self._evictions = 0
        self.num_kernel_values = 0

    def _new_cache(self, dtype: Any) -> RowCache:
        return RowCache(self._problem.num_samples, len(self._problem.samples), self._cache_bytes, dtype)

    def is_short_of_memory(self, num_support: int) -> bool:
        """Whether eliminating samples pays.

        Bringing them back will cost about a kernel row for each support vector. With room for less than half of those
        rows, as many will be computed again in a turn or two. Otherwise it is as with renting or buying skis: wait
        until that many were computed again, which at worst is twice the best choice.
        """
        return len(self._rows.rows) < num_support / 2 or self._rows.num_repeats > num_support

    @property
    def num_evictions(self) -> int:
        """Rows that gave way to others."""
        return self._evictions + self._rows.num_evictions

    def add(self, active: Active, panel: Samples, change: NDArray[np.float64]) -> None:
        """Add kernel rows times changes to the active gradients.

        Args:
            active: Its `g` grows.
            panel: The samples whose coefficients changed, each once, in the precision of kernel rows.
            change: By how much, shape (len(panel),).
        """
        if self._device is not None:
            if self._on_device is None or self._on_device[0] is not active.samples:
                rows = RowsOnDevice(self._problem.kernel, active.samples, self._device)
                self._on_device = active.samples, rows
            active.g += self._on_device[1].sums(panel, change)
            self.num_kernel_values += len(panel) * len(active)
            return
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
        """The active samples are others now."""
        self._rows.clear(num_active)

    def use(self, dtype: Any) -> None:
        """Kernel rows have another precision from now on; all samples are active."""
        self.release()
        self._evictions += self._rows.num_evictions
        self._rows = self._new_cache(dtype)

    def release(self) -> None:
        """Leave the memory to the next fit."""
        self._rows.release()
