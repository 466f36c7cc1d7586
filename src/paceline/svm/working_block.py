"""Kernel values among the working set; what the last working set already knew is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.svm.compiled import LANES, slide_and_mirror
from paceline.svm.kernels import Kernel
from paceline.svm.samples import Samples


class WorkingBlock:
    """The block of rank 0, in one buffer that is used again for every working set.

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

    def among(self, panel: Samples, which: NDArray[np.int64], num_known: int) -> NDArray[Any]:
        """Compute the values among the working set's variables.

        Args:
            panel: Its samples.
            which: Sample of every variable.
            num_known: Variables that were among the newest of the last set, and are the first, in the same order.

        Returns:
            Shape (variables, variables padded to LANES), zero in the padding; valid until the next call.
        """
        size = len(which)
        width = (size + LANES - 1) // LANES * LANES
        if len(panel) != size:
            out = np.zeros((size, width), panel.dtype)
            out[:, :size] = self._kernel.values(panel, panel)[np.ix_(which, which)]
            self.num_kernel_values += len(panel) ** 2
            self.forget()
            return out
        if self._buffer.dtype != panel.dtype or len(self._buffer) < size:
            most = max(self._size, size)
            self._buffer = np.zeros((most, (most + LANES - 1) // LANES * LANES), panel.dtype)
            self.forget()
        out = self._buffer[:size, :width]
        known = min(num_known, self._num_last)
        if known:
            slide_and_mirror(self._buffer, self._num_first, known, size)
        new = panel.take(slice(known, None))
        self._kernel.write_rows(new, panel, out, np.arange(known, size))
        self.num_kernel_values += len(new) * size
        slide_and_mirror(self._buffer, -1, known, size)
        out[:, size:] = 0
        self._num_first, self._num_last = num_known, size - num_known
        return out
