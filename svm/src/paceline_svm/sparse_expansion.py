"""Sums of Gaussian kernel values of sparse rows: predictions, and the check of the optimum.

Kernel values are never written to memory: LANES of them are computed side by side, from dense panels of as many
support vectors that stay in the processor's cache, and summed up at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline_svm.compiled import LANES, compiled
from paceline_svm.gaussian import Scratch, scratch_for, values
from paceline_svm.sample_forms import SparseSamples
from paceline_svm.thread_pool import for_each

_PANEL_BYTES = 4e6  # of support vectors in dense form at a time, if more than LANES of them are less
_ROWS = 2048  # samples of a piece of work
_SUMS = 8  # partial sums of a reduction, so that it is done in SIMD lanes


def expand_sparse(
    gamma: float, support: SparseSamples, coefficients: NDArray[np.float64], samples: SparseSamples
) -> NDArray[np.float64]:
    """As `kernels.expand`, for a Gaussian kernel.

    Args:
        gamma: Of the kernel.
        support: M samples.
        coefficients: Of E expansions, shape (E, M).
        samples: N samples in the same precision.

    Returns:
        Shape (E, N).
    """
    dtype, num_features = support.dtype, support.rows.shape[1]
    total = np.zeros((len(coefficients), len(samples)))
    at_once = LANES * max(1, int(_PANEL_BYTES // (LANES * num_features * dtype.itemsize)))
    squares = samples.squares.astype(dtype)

    for k in range(0, len(support), at_once):
        part = support.take(slice(k, k + at_once))
        num = -(-len(part) // LANES)
        padded = np.zeros((num * LANES, num_features), dtype)
        part.rows.toarray(out=padded[: len(part)])
        panels = np.ascontiguousarray(padded.reshape(num, LANES, num_features).transpose(0, 2, 1))
        of_support = np.zeros(num * LANES, dtype)
        of_support[: len(part)] = part.squares
        factors = np.zeros((len(coefficients), num * LANES))
        factors[:, : len(part)] = coefficients[:, k : k + at_once]

        def rows_from(
            first: int, panels: Any = panels, of_support: Any = of_support, factors: Any = factors
        ) -> None:
            rows = samples.rows[first : first + _ROWS]
            _add_sums(
                rows.indptr,
                rows.indices,
                rows.data,
                panels,
                (of_support, squares[first : first + _ROWS]),
                gamma,
                scratch_for(LANES, dtype),
                np.empty(LANES, dtype),
                np.empty(_SUMS),
                factors,
                total[:, first : first + _ROWS],
            )

        for_each(rows_from, range(0, len(samples), _ROWS))
    return total


@compiled
def _add_sums(
    indptr: NDArray[Any],
    indices: NDArray[Any],
    data: NDArray[Any],
    panels: NDArray[Any],
    squares: tuple[NDArray[Any], NDArray[Any]],
    gamma: float,
    scratch: Scratch,
    lanes: NDArray[Any],
    sums: NDArray[np.float64],
    factors: NDArray[np.float64],
    total: NDArray[np.float64],
) -> None:
    """Add factors times kernel values to `total`.

    Args:
        indptr: Of N sparse rows in CSR form, shape (N + 1,).
        indices: Column indices.
        data: Values.
        panels: Support vectors, LANES side by side, shape (G, features, LANES).
        squares: Squared lengths of support vectors, shape (G * LANES,), and of rows, shape (N,).
        gamma: Of the kernel.
        scratch: For LANES values.
        lanes: Scratch, shape (LANES,).
        sums: Scratch, shape (_SUMS,), in double precision.
        factors: Of the support vectors, shape (E, G * LANES).
        total: Shape (E, N).
    """
    E, N = total.shape
    for g in range(len(panels)):
        panel, behind = panels[g], squares[0][g * LANES : (g + 1) * LANES]
        for i in range(N):
            for k in range(LANES):
                lanes[k] = 0
            for e in range(indptr[i], indptr[i + 1]):
                v, row = data[e], panel[indices[e]]
                for k in range(LANES):
                    lanes[k] += v * row[k]
            values(lanes, squares[1][i], behind, gamma, scratch[0], scratch[1], lanes)
            for x in range(E):
                f = factors[x, g * LANES : (g + 1) * LANES]
                for j in range(_SUMS):
                    sums[j] = 0.0
                for k0 in range(0, LANES, _SUMS):
                    a, b = f[k0 : k0 + _SUMS], lanes[k0 : k0 + _SUMS]
                    for j in range(_SUMS):
                        sums[j] += a[j] * b[j]
                sum_of_row = 0.0
                for j in range(_SUMS):
                    sum_of_row += sums[j]
                total[x, i] += sum_of_row
