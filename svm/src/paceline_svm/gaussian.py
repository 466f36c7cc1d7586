"""Gaussian (RBF) kernel values from dot products, written and summed up in one pass: compiled.

exp(-gamma * |w - x|^2) is 2^z for a z <= 0. 2^z is 2^n, from the bits of a float, times the Taylor series of 2^r. With
|r| <= 1/2 the series needs 7 terms in single precision, and 13 in double.

Sums over sparse rows (predictions, and the check of the optimum) never write kernel values to memory. LANES of them are
computed at once, from dense panels of as many support vectors, which stay in the processor's cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline_svm.compiled import LANES, compiled, inner
from paceline_svm.sample_forms import SparseSamples
from paceline_svm.thread_pool import for_each

_f32, _f64 = np.float32, np.float64
Scratch = tuple[
    Any, Any
]  # for one row, in single and in double precision; None is the precision that is not used
LOG2_E = 1.4426950408889634
# ln(2)^k / k!
TAYLOR = (
    *(0.6931471805599453, 0.24022650695910072, 0.05550410866482158, 0.009618129107628477),
    *(0.0013333558146428441, 1.540353039338161e-4, 1.525273380405984e-5, 1.3215486790144305e-6),
    *(1.0178086009239696e-7, 7.0549116208011209e-9, 4.4455382718708101e-10),
    *(2.5678435993488196e-11, 1.3691488853904124e-12),
)
_T1, _T2, _T3, _T4, _T5, _T6, _T7, _T8, _T9, _T10, _T11, _T12, _T13 = TAYLOR


def scratch_for(num: int, dtype: Any) -> Scratch:
    """Scratch for rows of up to `num` kernel values: bits, the same memory as numbers, polynomials."""
    bits = np.empty(num, np.int32 if dtype == np.float32 else np.int64)
    found = bits, bits.view(dtype), np.empty(num, dtype)
    return (found, None) if dtype == np.float32 else (None, found)


@inner
def values_single(
    dots: NDArray[np.float32],
    square: float,
    squares: NDArray[Any],
    gamma: float,
    scratch: tuple[NDArray[Any], NDArray[Any], NDArray[Any]],
    out: NDArray[Any],
) -> None:
    """Write exp(-gamma * |w - x|^2) of one w with N x to `out`, in single precision; `out` may be `dots`.

    Args:
        dots: <w, x>, shape (N,).
        square: |w|^2.
        squares: |x|^2, shape (N,).
        gamma: Of the kernel.
        scratch: As `scratch_for` makes it; overwritten.
        out: Shape (N,).
    """
    N = len(dots)
    scale, half = _f32(2.0 * gamma * LOG2_E), _f32(-gamma * LOG2_E)
    w = half * _f32(square)
    bits, power, p = scratch[0][:N], scratch[1][:N], scratch[2][:N]
    for t in range(N):
        z = scale * _f32(dots[t]) + (w + half * _f32(squares[t]))
        if z > _f32(0.0):
            z = _f32(0.0)
        if z < _f32(-126.0):
            z = _f32(-126.0)
        n = np.int32(z - _f32(0.5))
        r = z - _f32(n)
        q = _f32(_T5) + r * (_f32(_T6) + r * _f32(_T7))
        q = _f32(_T2) + r * (_f32(_T3) + r * (_f32(_T4) + r * q))
        p[t] = _f32(1.0) + r * (_f32(_T1) + r * q)
        bits[t] = (n + np.int32(127)) << np.int32(23)
    for t in range(N):
        out[t] = p[t] * power[t]


@inner
def values_double(
    dots: NDArray[np.float64],
    square: float,
    squares: NDArray[Any],
    gamma: float,
    scratch: tuple[NDArray[Any], NDArray[Any], NDArray[Any]],
    out: NDArray[Any],
) -> None:
    """Compute as `values_single` does, in double precision."""
    N = len(dots)
    scale, half = 2.0 * gamma * LOG2_E, -gamma * LOG2_E
    w = half * square
    bits, power, p = scratch[0][:N], scratch[1][:N], scratch[2][:N]
    for t in range(N):
        z = scale * dots[t] + (w + half * squares[t])
        if z > 0.0:
            z = 0.0
        if z < -1022.0:
            z = -1022.0
        n = np.int64(z - 0.5)
        r = z - _f64(n)
        q = _T10 + r * (_T11 + r * (_T12 + r * _T13))
        q = _T6 + r * (_T7 + r * (_T8 + r * (_T9 + r * q)))
        q = _T2 + r * (_T3 + r * (_T4 + r * (_T5 + r * q)))
        p[t] = 1.0 + r * (_T1 + r * q)
        bits[t] = (n + 1023) << 52
    for t in range(N):
        out[t] = p[t] * power[t]


@inner
def values(
    dots: NDArray[Any],
    square: float,
    squares: NDArray[Any],
    gamma: float,
    single: Any,
    double: Any,
    out: NDArray[Any],
) -> None:
    """Call `values_single` or `values_double`: the one whose scratch is not None. Only that one is compiled."""
    if single is not None:
        values_single(dots, square, squares, gamma, single, out)
    if double is not None:
        values_double(dots, square, squares, gamma, double, out)


@inner
def add_scaled(total: NDArray[np.float64], factor: float, row: NDArray[Any]) -> None:
    """Add factor * row to `total`, which may be longer."""
    for t in range(len(row)):
        total[t] += factor * row[t]


@compiled
def gaussian_rows(
    dots: NDArray[Any],
    squares: tuple[NDArray[Any], NDArray[Any]],
    gamma: float,
    scratch: Scratch,
    spare: NDArray[Any],
    out: NDArray[Any],
    slots: NDArray[np.int64],
    first: int,
    factors: NDArray[np.float64],
    total: NDArray[np.float64],
) -> None:
    """Write kernel values into `out[slots, first:first + N]`, and sum them up.

    Both in one pass over what the matrix product left in the processor's cache.

    Args:
        dots: <w, x>, shape (M, N).
        squares: |w|^2, shape (M,), and |x|^2, shape (N,).
        gamma: Of the kernel.
        scratch: For rows of N; says which precision.
        spare: Room for a row that is not kept, shape (N,).
        out: Kernel rows, shape (R, C).
        slots: Which rows of `out`, shape (M,); a row with -1 is not kept.
        first: The first column to write.
        factors: Of the rows, shape (M,), or none.
        total: `total[first:first + N]` grows by factors times rows, in double precision.
    """
    M, N = dots.shape
    sums = total[first : first + N] if len(factors) else total[:0]
    for k in range(M):
        o = out[slots[k], first : first + N] if slots[k] >= 0 else spare
        values(dots[k], squares[0][k], squares[1], gamma, scratch[0], scratch[1], o)
        if len(factors):
            add_scaled(sums, factors[k], o)


_PANEL_BYTES = 4e6  # of support vectors in dense form at a time, if more than LANES of them are less
_ROWS = 2048  # samples of a piece of work
_SUMS = 8  # partial sums of a reduction, so that it is done in SIMD lanes


def expand_sparse(
    gamma: float, support: SparseSamples, coefficients: NDArray[np.float64], samples: SparseSamples
) -> NDArray[np.float64]:
    """Compute as `kernels.expand` does, for a Gaussian kernel.

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
