"""Kernel values among the working set; what the last working set already knew is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.svm.compiled import LANES, compiled
from paceline.svm.kernels import Kernel
from paceline.svm.samples import Samples


class WorkingBlock:
    """The block in one buffer that is used again for every working set.

    Args:
        kernel: Between samples.
        size: Variables of a working set, at most.

    Attributes:
        num_kernel_values: Kernel values computed so far.
    """

    def __init__(self, kernel: Kernel, size: int) -> None:
        self._kernel = kernel
        self._size = size
        self._num_first = self._num_last = 0
        self._buffer: NDArray[Any] = np.zeros((0, 0))
        self.num_kernel_values = 0

    def forget(self) -> None:
        """Know nothing of the last working set; the precision may change."""
        self._num_first = self._num_last = 0

    def among(self, panel: Samples, num_known: int) -> NDArray[Any]:
        """Compute the values among the working set's samples.

        Args:
            panel: They, each once.
            num_known: Samples that were among the newest of the last set, and are the first, in the same order.

        Returns:
            Shape (samples, samples padded to LANES), zero in the padding; valid until the next call.
        """
        size = len(panel)
        width = (size + LANES - 1) // LANES * LANES
        if self._buffer.dtype != panel.dtype or len(self._buffer) < size:
            most = max(self._size, size)
            self._buffer = np.zeros((most, (most + LANES - 1) // LANES * LANES), panel.dtype)
            self.forget()
        out = self._buffer[:size, :width]
        known = min(num_known, self._num_last)
        if known:
            _slide_and_mirror(self._buffer, self._num_first, known, size)
        new = panel.take(slice(known, None))
        self._kernel.write_rows(new, panel, out, np.arange(known, size))
        self.num_kernel_values += len(new) * size
        _slide_and_mirror(self._buffer, -1, known, size)
        out[:, size:] = 0
        self._num_first, self._num_last = num_known, size - num_known
        return np.ascontiguousarray(out)


@compiled
def _slide_and_mirror(block: NDArray[Any], first: int, known: int, size: int) -> None:
    """Move the values that are known to the front of a block before the others are computed, or mirror those after.

    Args:
        block: Kernel values among variables, at least `size` rows and columns.
        first: Where the known square begins; -1 to mirror rows from `known` on to the columns from `known` on.
        known: Variables of the square.
        size: Variables of the block.
    """
    if first >= 0:
        for i in range(known):
            source, target = block[first + i, first : first + known], block[i]
            for j in range(known):
                target[j] = source[j]
        return
    width = 32  # tiles: a column at a time would miss the cache at every step
    for i0 in range(known, size, width):
        for j0 in range(0, known, width):
            for j in range(j0, min(j0 + width, known)):
                for i in range(i0, min(i0 + width, size)):
                    block[j, i] = block[i, j]
