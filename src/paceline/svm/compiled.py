"""Loops over kernel values that numpy and torch would do in several passes over memory, compiled by numba.

Rules
1. A loop that must be vectorised runs over a slice from 0, in lanes: `a[t0 + t]` and scalar minima are not.
2. Compiled code is kept on disk beside this file (or in numba's own cache folder): only the first process of a
   machine waits for the compiler.
3. No NaN or infinity reaches these loops; "cannot" is the finite number `FAR`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

LANES = 64
FAR = 1e30
_F = TypeVar("_F", bound=Callable[..., Any])
_f32, _f64 = np.float32, np.float64
_LOG2_E = 1.4426950408889634
# ln(2)^k / k!: the Taylor series of 2^r, of which |r| <= 1/2 needs 7 terms in single and 13 in double precision.
_T1, _T2, _T3, _T4 = 0.6931471805599453, 0.24022650695910072, 0.05550410866482158, 0.009618129107628477
_T5, _T6, _T7, _T8 = 0.0013333558146428441, 1.540353039338161e-4, 1.525273380405984e-5, 1.3215486790144305e-6
_T9, _T10, _T11 = 1.0178086009239696e-7, 7.0549116208011209e-9, 4.4455382718708101e-10
_T12, _T13 = 2.5678435993488196e-11, 1.3691488853904124e-12


def compiled(function: _F) -> _F:
    """Compile when first called, and keep the code on disk."""
    fast = {"nnan", "ninf", "nsz", "arcp", "contract"}
    return cast("_F", numba.njit(fastmath=fast, error_model="numpy", nogil=True, cache=True)(function))


@compiled
def rbf_rows_single(
    dots: NDArray[np.float32],
    left_squares: NDArray[np.float32],
    right_squares: NDArray[np.float32],
    gamma: float,
    out: NDArray[np.float32],
    slots: NDArray[np.int64],
    first: int,
    factors: NDArray[np.float64],
    total: NDArray[np.float64],
) -> None:
    """Write exp(-gamma * |w - x|^2) into `out[slots, first:first + N]`, in single precision, and sum it up.

    Both in one pass over what the matrix product left in the processor's cache.

    Args:
        dots: <w, x>, shape (M, N).
        left_squares: |w|^2, shape (M,).
        right_squares: |x|^2, shape (N,).
        gamma: Of the kernel.
        out: Kernel rows, shape (R, C).
        slots: Which rows of `out`, shape (M,); a row with -1 is not kept.
        first: The first column to write.
        factors: Of the rows, shape (M,), or none.
        total: `total[first:first + N]` grows by factors times rows, in double precision.
    """
    M, N = dots.shape
    scale = _f32(2.0 * gamma * _LOG2_E)
    half = _f32(-gamma * _LOG2_E)
    bits = np.empty(N, np.int32)
    power = bits.view(np.float32)
    p = np.empty(N, np.float32)
    spare = np.empty(N, np.float32)
    sums = total[first : first + N] if len(factors) else total[:0]
    for k in range(M):
        w = half * left_squares[k]
        G = dots[k]
        o = out[slots[k], first : first + N] if slots[k] >= 0 else spare
        for t in range(N):
            z = scale * G[t] + (w + half * right_squares[t])
            z = min(_f32(0.0), z)
            z = max(_f32(-126.0), z)
            n = np.int32(z - _f32(0.5))
            r = z - _f32(n)
            q = _f32(_T5) + r * (_f32(_T6) + r * _f32(_T7))
            q = _f32(_T2) + r * (_f32(_T3) + r * (_f32(_T4) + r * q))
            p[t] = _f32(1.0) + r * (_f32(_T1) + r * q)
            bits[t] = (n + np.int32(127)) << np.int32(23)
        for t in range(N):
            o[t] = p[t] * power[t]
        if len(factors):
            factor = factors[k]
            for t in range(N):
                sums[t] += factor * o[t]


@compiled
def rbf_rows_double(
    dots: NDArray[np.float64],
    left_squares: NDArray[np.float64],
    right_squares: NDArray[np.float64],
    gamma: float,
    out: NDArray[np.float64],
    slots: NDArray[np.int64],
    first: int,
    factors: NDArray[np.float64],
    total: NDArray[np.float64],
) -> None:
    """As `rbf_rows_single`, in double precision."""
    M, N = dots.shape
    scale = 2.0 * gamma * _LOG2_E
    half = -gamma * _LOG2_E
    bits = np.empty(N, np.int64)
    power = bits.view(np.float64)
    p = np.empty(N, np.float64)
    spare = np.empty(N, np.float64)
    sums = total[first : first + N] if len(factors) else total[:0]
    for k in range(M):
        w = half * left_squares[k]
        G = dots[k]
        o = out[slots[k], first : first + N] if slots[k] >= 0 else spare
        for t in range(N):
            z = scale * G[t] + (w + half * right_squares[t])
            z = min(0.0, z)
            z = max(-1022.0, z)
            n = np.int64(z - 0.5)
            r = z - _f64(n)
            q = _T10 + r * (_T11 + r * (_T12 + r * _T13))
            q = _T6 + r * (_T7 + r * (_T8 + r * (_T9 + r * q)))
            q = _T2 + r * (_T3 + r * (_T4 + r * (_T5 + r * q)))
            p[t] = 1.0 + r * (_T1 + r * q)
            bits[t] = (n + 1023) << 52
        for t in range(N):
            o[t] = p[t] * power[t]
        if len(factors):
            factor = factors[k]
            for t in range(N):
                sums[t] += factor * o[t]


@compiled
def copy_rows(
    values: NDArray[Any],
    out: NDArray[Any],
    slots: NDArray[np.int64],
    first: int,
    factors: NDArray[np.float64],
    total: NDArray[np.float64],
) -> None:
    """Write `values`, shape (M, N), into `out[slots, first:first + N]`, and sum them up, as `rbf_rows_single` does."""
    M, N = values.shape
    sums = total[first : first + N] if len(factors) else total[:0]
    for k in range(M):
        G = values[k]
        if slots[k] >= 0:
            o = out[slots[k], first : first + N]
            for t in range(N):
                o[t] = G[t]
        if len(factors):
            factor = factors[k]
            for t in range(N):
                sums[t] += factor * G[t]


@compiled
def add_rows(
    rows: NDArray[Any], slots: NDArray[np.int64], factors: NDArray[np.float64], total: NDArray[np.float64]
) -> None:
    """Add sum_k factors[k] * rows[slots[k], :N] to `total`, shape (N,), in double precision."""
    N = len(total)
    M = len(slots)
    width = 4096
    for t0 in range(0, N, width):
        L = min(width, N - t0)
        o = total[t0 : t0 + L]
        k = 0
        while k + 4 <= M:
            a, b = rows[slots[k], t0 : t0 + L], rows[slots[k + 1], t0 : t0 + L]
            c, d = rows[slots[k + 2], t0 : t0 + L], rows[slots[k + 3], t0 : t0 + L]
            u, v, w, x = factors[k], factors[k + 1], factors[k + 2], factors[k + 3]
            for t in range(L):
                o[t] += u * a[t] + v * b[t] + w * c[t] + x * d[t]
            k += 4
        while k < M:
            a = rows[slots[k], t0 : t0 + L]
            u = factors[k]
            for t in range(L):
                o[t] += u * a[t]
            k += 1


@compiled
def sparse_dots(
    indptr: NDArray[Any],
    indices: NDArray[Any],
    data: NDArray[Any],
    panel: NDArray[Any],
    out: NDArray[Any],
) -> None:
    """Dot products of sparse rows with a dense panel.

    Args:
        indptr: Of N sparse rows in CSR form, shape (N + 1,).
        indices: Column indices.
        data: Values.
        panel: LANES other rows side by side, shape (features, LANES).
        out: The products, shape (LANES, N).
    """
    N = len(indptr) - 1
    acc = np.empty(LANES, out.dtype)
    for i in range(N):
        for k in range(LANES):
            acc[k] = 0
        for e in range(indptr[i], indptr[i + 1]):
            v = data[e]
            row = panel[indices[e]]
            for k in range(LANES):
                acc[k] += v * row[k]
        for k in range(LANES):
            out[k, i] = acc[k]


@compiled
def compact_rows(
    flat: NDArray[Any], old_width: int, slots: NDArray[np.int64], keep: NDArray[np.int64]
) -> None:
    """Move rows to the front of `flat`, and of each keep only some columns.

    Args:
        flat: Rows of `old_width` numbers end to end; afterwards row i is old row slots[i], len(keep) numbers wide.
        old_width: Numbers a row.
        slots: Rows to keep, ascending, shape (M,).
        keep: Columns to keep, ascending.
    """
    width = len(keep)
    for i in range(len(slots)):
        source = slots[i] * old_width
        target = i * width
        for j in range(width):
            flat[target + j] = flat[source + keep[j]]


@compiled
def violations(
    g: NDArray[np.float64],
    linear: NDArray[np.float64],
    beta: NDArray[np.float64],
    lower: NDArray[np.float64],
    upper: NDArray[np.float64],
    left_out: NDArray[np.bool_],
    growing: NDArray[np.float64],
    shrinking: NDArray[np.float64],
) -> tuple[float, float]:
    """How badly each variable violates optimality, in one pass.

    Args:
        g: Of N samples.
        linear: Of S variables a sample, shape (S, N); so are `beta`, `lower`, `upper`.
        beta: Coefficients.
        lower: Least coefficients.
        upper: Largest coefficients.
        left_out: Variables that count for the extremes only, shape (S, N).
        growing: Gradients of those that may grow, `FAR` for others; shape (S, N), written.
        shrinking: Minus the gradients of those that may shrink, `FAR` for others; written.

    Returns:
        The least gradient of those that may grow, and the largest of those that may shrink.
    """
    S, N = linear.shape
    least, most = np.inf, -np.inf
    for s in range(S):
        for i in range(N):
            f = g[i] + linear[s, i]
            up, down = FAR, FAR
            if beta[s, i] < upper[s, i]:
                least = min(least, f)
                up = f
            if beta[s, i] > lower[s, i]:
                most = max(most, f)
                down = -f
            growing[s, i] = FAR if left_out[s, i] else up
            shrinking[s, i] = FAR if left_out[s, i] else down
    return least, most


@compiled
def slide_and_mirror(block: NDArray[Any], first: int, known: int, size: int) -> None:
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
