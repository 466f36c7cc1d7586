"""Gaussian (RBF) kernel values from dot products, written and summed up in one pass: compiled.

exp(-gamma * |w - x|^2) is 2^z for a z <= 0; 2^z is 2^n from the bits of a float times the Taylor series of 2^r, of
which |r| <= 1/2 needs 7 terms in single and 13 in double precision.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline_svm.compiled import compiled, inner

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
    """As `values_single`, in double precision."""
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
    """As `values_single` or `values_double`: whose scratch is not None. Only that one is compiled."""
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
