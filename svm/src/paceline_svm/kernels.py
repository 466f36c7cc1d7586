"""Kernel functions: blocks of kernel values in tiles that stay in the processor's cache, and sums of kernel values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline_svm.compiled import compiled
from paceline_svm.gaussian import add_scaled, expand_sparse, gaussian_rows, scratch_for
from paceline_svm.sample_forms import GramSamples, Samples, SparseSamples
from paceline_svm.thread_pool import for_each

_TILE, _WIDEST = 512, 4096
_NO_FACTORS = np.zeros(0)
_ROWS, _COLUMNS = 512, 2048  # of a tile of `expand`


@dataclass(frozen=True)
class Kernel:
    """A kernel function with its parameters.

    Attributes:
        name: `rbf`, `linear`, `poly`, `sigmoid`, or `precomputed` (samples are then rows of a Gram matrix).
        gamma: Scale of the dot product or distance.
        coef0: Added to the dot product (`poly`, `sigmoid`).
        degree: Exponent (`poly`).
    """

    name: str
    gamma: float = 1.0
    coef0: float = 0.0
    degree: float = 3

    def values(self, left: Samples, right: Samples) -> NDArray[Any]:
        """Kernel values of two sets of samples in their common precision, shape (len(left), len(right))."""
        out = np.empty((len(left), len(right)), left.dtype)
        self.write_rows(left, right, out, np.arange(len(left)))
        return out

    def write_rows(self, left: Samples, right: Samples, out: NDArray[Any], slots: NDArray[np.int64]) -> None:
        """Write the kernel values of `left[i]` with all of `right` to `out[slots[i], :len(right)]`.

        Contract:
            `left`, `right` and `out` have one precision.
        """
        self.add_rows(left, right, out, slots, _NO_FACTORS, _NO_FACTORS)

    def add_rows(
        self,
        left: Samples,
        right: Samples,
        out: NDArray[Any],
        slots: NDArray[np.int64],
        factors: NDArray[np.float64],
        total: NDArray[np.float64],
    ) -> None:
        """Write rows, and add factors[i] times row i to `total`, shape (len(right),), in double precision.

        A row whose slot is -1 is not kept: it never leaves the processor's cache.
        """
        left_squares, right_squares = left.squares.astype(out.dtype), right.squares.astype(out.dtype)
        panels = [(k, left.take(slice(k, k + _TILE))) for k in range(0, len(left), _TILE)]
        width = min(_WIDEST, _TILE * _TILE // max(1, min(len(left), _TILE)))

        def tile_from(first: int) -> None:
            tile = right.take(slice(first, first + width))
            scratch = np.empty(min(len(left), _TILE) * len(tile), out.dtype)
            row_scratch, spare = scratch_for(len(tile), out.dtype), np.empty(len(tile), out.dtype)
            for k, panel in panels:
                dots = scratch[: len(panel) * len(tile)].reshape(len(panel), len(tile))
                panel.dots(tile, dots)
                chosen = slice(k, k + _TILE)
                if self.name == "rbf":
                    squares = left_squares[chosen], right_squares[first : first + width]
                    gaussian_rows(
                        dots,
                        squares,
                        self.gamma,
                        row_scratch,
                        spare,
                        out,
                        slots[chosen],
                        first,
                        factors[chosen],
                        total,
                    )
                else:
                    copy_rows(self._of_dots(dots), out, slots[chosen], first, factors[chosen], total)

        for_each(tile_from, range(0, len(right), width))

    def diagonal(self, samples: Samples) -> NDArray[np.float64]:
        """Kernel values of samples with themselves, shape (N,); columns of a Gram matrix are they, in order."""
        if isinstance(samples, GramSamples):
            return np.ascontiguousarray(samples.rows.diagonal(), np.float64)
        if self.name == "rbf":
            return np.ones(len(samples))
        return np.asarray(self._of_dots(samples.squares), np.float64)

    def _of_dots(self, dots: NDArray[Any]) -> NDArray[Any]:
        if self.name == "poly":
            return _power(self.gamma * dots + self.coef0, self.degree)
        if self.name == "sigmoid":
            return np.asarray(np.tanh(self.gamma * dots + self.coef0), dots.dtype)
        return dots


def _power(base: NDArray[Any], exponent: float) -> NDArray[Any]:
    """Raise to a power; by products where it is a small whole number, which is ten times faster than `pow`."""
    if exponent not in range(1, 9):
        return np.asarray(base**exponent, base.dtype)
    result = base
    for _ in range(int(exponent) - 1):
        result = result * base
    return result


@compiled
def copy_rows(
    values: NDArray[Any],
    out: NDArray[Any],
    slots: NDArray[np.int64],
    first: int,
    factors: NDArray[np.float64],
    total: NDArray[np.float64],
) -> None:
    """Write `values`, shape (M, N), into `out[slots, first:first + N]`, and sum them up, as `gaussian_rows` does."""
    M, N = values.shape
    sums = total[first : first + N] if len(factors) else total[:0]
    for k in range(M):
        G = values[k]
        if slots[k] >= 0:
            o = out[slots[k], first : first + N]
            for t in range(N):
                o[t] = G[t]
        if len(factors):
            add_scaled(sums, factors[k], G)


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
    if kernel.name == "rbf" and isinstance(support, SparseSamples):
        assert isinstance(samples, SparseSamples)
        return expand_sparse(kernel.gamma, support, coefficients, samples)
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

    for_each(tile_from, range(0, len(samples), _COLUMNS))
    return total
