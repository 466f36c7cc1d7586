"""A working set's sub-problem: its variables are optimised by SMO, all others stay where they are.

Pair updates touch a part of the working set only. Where rows are short, the kernel values among its samples are
computed row by row when first needed; where they are long or not dense, all at once, by a matrix product.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from paceline_svm.compiled import LANES, compiled
from paceline_svm.kernel_rows import row_store, source_of
from paceline_svm.kernels import Kernel
from paceline_svm.sample_forms import DenseSamples, Samples
from paceline_svm.smo import Variables, lane_memory, lanes_of, solve

_NARROW = 48  # features from which a matrix product pays, though half of its values are never used


class SubProblem:
    """Solves working sets, one after another, in memory that is used again.

    Args:
        kernel: Between samples.

    Attributes:
        num_kernel_values: Kernel values computed so far.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._block = WorkingBlock(kernel)
        self._room: NDArray[Any] = np.empty(0)
        self._num_values = 0

    @property
    def num_kernel_values(self) -> int:
        return self._num_values + self._block.num_kernel_values

    def forget(self) -> None:
        """Know nothing of the last working set; the precision may change."""
        self._block.forget()

    def solve(
        self, panel: Samples, num_known: int, table: NDArray[np.float64], target: float, most_steps: int
    ) -> tuple[NDArray[np.float64], int, float]:
        """Optimise.

        Args:
            panel: M samples, each once.
            num_known: The first of them, which were among the newest of the last set, in the same order.
            table: Gradients, coefficients, least and largest coefficients, shape (4, S, M).
            target: Stop when the largest violation is below it.
            most_steps: Stop after as many pair updates.

        Returns:
            The coefficients, shape (S, M), the number of pair updates, and by how much they lowered the objective.
        """
        num = len(panel)
        width = -(-num // LANES) * LANES
        padded = np.zeros((4, table.shape[1], width))
        padded[:, :, :num] = table
        diagonal = np.ones(width)
        if isinstance(panel, DenseSamples) and panel.rows.shape[1] < _NARROW:
            source = source_of(self._kernel, panel, panel.dtype)
            diagonal[:num] = self._kernel.diagonal(panel)
            store = row_store(source, num, self._rows(num, width, panel.dtype))
        else:
            source = source_of(self._kernel, None, panel.dtype)
            K: NDArray[Any] = self._block.among(panel, num_known)
            diagonal[:num] = K.diagonal()
            store = row_store(source, num, K)
            store.slot_of[:] = np.arange(num)
        rounded = padded[0].ravel().astype(store.rows.dtype), diagonal.astype(store.rows.dtype)
        variables = Variables(rounded[0], padded[1].ravel(), padded[2].ravel(), padded[3].ravel(), rounded[1])
        memory = lane_memory(len(variables.F), variables.F.dtype)
        lanes = cast("Any", lanes_of).py_func(store, variables, memory)
        steps, decrease, num_values = solve(source, store, variables, lanes, memory, target, most_steps)
        self._num_values += num_values
        return variables.beta.reshape(-1, width)[:, :num], steps, decrease

    def _rows(self, num: int, width: int, dtype: Any) -> NDArray[Any]:
        """Room for all rows; pages that are never written to cost nothing."""
        if len(self._room) < num * width or self._room.dtype != dtype:
            self._room = np.empty(2 * num * width, dtype)
        return self._room[: num * width].reshape(num, width)


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
