"""Gradient updates: kernel rows of the coefficients that changed, from the cache, computed, or on a GPU.

A GPU computes a kernel row faster than it could fetch it from anywhere, so nothing is cached there: rows are computed,
summed up and forgotten, and only gradients come back. The check of the optimum stays on the processor, in double
precision. Never measured on a GPU; tests run it on the processor's device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline_svm.kernels import Kernel
from paceline_svm.problem import Active, Problem
from paceline_svm.row_cache import RowCache, add_rows
from paceline_svm.sample_forms import DenseSamples, Samples
from paceline_svm.world import World

_SINGLE_TOL = 1e-4
_SINGLE_EXPONENT = 1e4
_SAFETY = 4.0  # so single precision up to C = 2,000 for a tol of 0.001
_ROWS_ON_DEVICE = 4096  # at a time


def rows_dtype(problem: Problem, tol: float, world: World) -> np.dtype[Any]:
    """Single precision where a Gaussian kernel is well scaled, and neither `tol` small nor coefficients large.

    A gradient errs by an epsilon for each unit of a coefficient: where that is near `tol`, pair updates go round in
    circles. Alike on all ranks. Collective.
    """
    kernel = problem.kernel
    exponent = kernel.gamma * float(problem.samples.squares.max(initial=0.0))
    largest = float(np.maximum(problem.upper, -problem.lower).max(initial=0.0))
    error = _SAFETY * float(np.finfo(np.float32).eps) * largest
    wants = kernel.name != "rbf" or tol < _SINGLE_TOL or exponent > _SINGLE_EXPONENT or error > tol
    wanted = world.total(np.array([int(wants)]), "agreeing on the precision")[0]
    return np.dtype(np.float64 if wanted else np.float32)


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
        self._device = device_for(problem.kernel, problem.samples)
        self._on_device: tuple[Samples, RowsOnDevice] | None = None  # of which samples
        self._rows = self._new_cache(dtype)
        self._evictions = 0
        self.num_kernel_values = 0

    def _new_cache(self, dtype: Any) -> RowCache:
        least, most = self._cache_bytes
        return RowCache(self._problem.num_samples, len(self._problem.samples), least, dtype, most)

    def is_short_of_memory(self, num_support: int) -> bool:
        """Whether eliminating samples pays.

        Bringing them back will cost about a kernel row for each support vector. With room for less than half of those
        rows, as many will be computed again in an iteration or two. Otherwise it is as with renting or buying skis:
        wait until that many were computed again, which at worst is twice the best choice.
        """
        return self._rows.most_rows < num_support / 2 or self._rows.num_repeats > num_support

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
        """Leave the cache's memory to the next fit."""
        self._rows.release()


def device_for(kernel: Kernel, samples: Samples) -> torch.device | None:
    """The GPU to use, if torch has one and the samples are dense; else None."""
    if not torch.cuda.is_available() or not isinstance(samples, DenseSamples) or kernel.name == "precomputed":
        return None
    return torch.device("cuda", torch.cuda.current_device())


class RowsOnDevice:
    """Sums of kernel rows over some samples that stay on a device.

    Args:
        kernel: Between samples.
        samples: N active samples; they must be dense, and are copied once.
        device: Where.
    """

    def __init__(self, kernel: Kernel, samples: Samples, device: torch.device) -> None:
        assert isinstance(samples, DenseSamples)
        self._kernel, self._device = kernel, device
        self._rows = self._there(samples.rows)
        self._squares = self._there(samples.squares.astype(samples.dtype))

    def sums(self, panel: Samples, factors: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sum of factors[k] times the kernel row of panel[k], shape (N,), summed in double precision."""
        assert isinstance(panel, DenseSamples)
        total = torch.zeros(len(self._rows), dtype=torch.float64, device=self._device)
        for k in range(0, len(panel), _ROWS_ON_DEVICE):
            part = panel.take(slice(k, k + _ROWS_ON_DEVICE))
            values = self._values(self._there(part.rows), self._there(part.squares.astype(part.dtype)))
            total += self._there(factors[k : k + _ROWS_ON_DEVICE]) @ values.double()
        return total.cpu().numpy()

    def _values(self, rows: Tensor, squares: Tensor) -> Tensor:
        kernel, dots = self._kernel, rows @ self._rows.t()
        if kernel.name == "rbf":
            return torch.exp((2 * dots - squares[:, None] - self._squares).clamp_(max=0).mul_(kernel.gamma))
        if kernel.name == "poly":
            return (kernel.gamma * dots + kernel.coef0) ** kernel.degree
        if kernel.name == "sigmoid":
            return torch.tanh(kernel.gamma * dots + kernel.coef0)
        return dots

    def _there(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
