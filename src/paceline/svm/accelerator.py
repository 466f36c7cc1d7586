"""Kernel rows on a GPU: computed, summed up and forgotten; only gradients come back.

A GPU computes a kernel row faster than it could fetch it from anywhere, so nothing is cached there. The check of the
optimum stays on the processor, in double precision. Not measured: the machine this was written on has no GPU; tests
run it on the processor's device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.svm.kernels import Kernel
from paceline.svm.samples import DenseSamples, Samples

_ROWS = 4096  # kernel rows at a time


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
        for k in range(0, len(panel), _ROWS):
            part = panel.take(slice(k, k + _ROWS))
            values = self._values(self._there(part.rows), self._there(part.squares.astype(part.dtype)))
            total += self._there(factors[k : k + _ROWS]) @ values.double()
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
