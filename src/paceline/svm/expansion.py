"""Sums of kernel values: what a model predicts, and what gradients are made of."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.svm.kernels import Kernel
from paceline.svm.samples import Samples
from paceline.svm.threads import each

_ROWS, _COLUMNS = 512, 2048


def expand(
    kernel: Kernel, support: Samples, coefficients: NDArray[np.float64], samples: Samples
) -> NDArray[np.float64]:
    """Compute sum_j coefficients[e, j] * K(support[j], samples[i]) for every i and e.

    Args:
        kernel: Which.
        support: M samples.
        coefficients: Of E expansions, shape (E, M).
        samples: N samples in the same precision; kernel values have it too, sums are in double precision.

    Returns:
        Shape (E, N).
    """
    total = np.zeros((len(coefficients), len(samples)))
    is_one = len(coefficients) == 1
    slots = np.full(_ROWS, -1) if is_one else np.arange(_ROWS)

    def tile_from(first: int) -> None:
        values = np.empty((1 if is_one else _ROWS, _COLUMNS), support.dtype)
        tile = samples.take(slice(first, first + _COLUMNS))
        for k in range(0, len(support), _ROWS):
            panel = support.take(slice(k, k + _ROWS))
            factors, out = coefficients[:, k : k + _ROWS], total[:, first : first + len(tile)]
            if is_one:
                kernel.add_rows(panel, tile, values, slots[: len(panel)], factors[0], out[0])
            else:
                kernel.write_rows(panel, tile, values, slots[: len(panel)])
                out += factors @ values[: len(panel), : len(tile)]

    each(tile_from, range(0, len(samples), _COLUMNS))
    return total
