"""Kernel values among the working set; what the last working set already knew is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.svm.compiled import LANES, compiled
from paceline.svm.kernels import Kernel
from paceline.svm.samples import Samples


class WorkingBlock:
    """The block, in one of two buffers that are used in turn.

    Args:
        kernel: Between samples.

    Attributes:
        num_kernel_values: Kernel values computed so far.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._memory: list[NDArray[Any]] = [np.empty(0), np.empty(0)]
        self.num_kernel_values = 0
        self.forget()

    def forget(self) -> None:
        """Know nothing of the last working set; the precision may change."""
        self._last: NDArray[Any] = np.zeros((0, 0))  # among the newest of the last set

    def among(self, panel: Samples, num_known: int) -> NDArray[Any]:
        """Compute the values among the working set's samples.

        Args:
            panel: They, each once.
            num_known: Samples that were among the newest of the last set, and are the first, in the same order.

        Returns:
            Shape (samples, samples padded to LANES), zero in the padding; valid until the call after the next.
        """
        size = len(panel)
        width = (size + LANES - 1) // LANES * LANES
        memory, self._memory = self._memory[0], self._memory[::-1]
        if len(memory) < size * width or memory.dtype != panel.dtype:
            memory = self._memory[1] = np.empty(size * width, panel.dtype)
        out = memory[: size * width].reshape(size, width)
        known = min(num_known, len(self._last))
        out[:known, :known] = self._last[:known, :known]
        out[:, size:] = 0
        new = panel.take(slice(known, None))
        self._kernel.write_rows(new, panel, out, np.arange(known, size))
        self.num_kernel_values += len(new) * size
        _mirror(out, known, size)
        self._last = out[num_known:, num_known:]
        return out


@compiled
def _mirror(block: NDArray[Any], known: int, size: int) -> None:
    """Write the first `known` columns of the rows from `known` on to the columns from there on."""
    width = 32  # tiles: a column at a time would miss the cache at every step
    for i0 in range(known, size, width):
        for j0 in range(0, known, width):
            for j in range(j0, min(j0 + width, known)):
                for i in range(i0, min(i0 + width, size)):
                    block[j, i] = block[i, j]
