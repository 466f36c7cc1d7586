"""Loops that numpy and torch would do in several passes over memory, compiled by numba.

Rules
1. A loop that must be vectorised runs over a slice from 0, in lanes: `a[t0 + t]` and scalar minima are not.
2. Compiled code is kept on disk beside this file (or in numba's own cache folder): only the first process of a
   machine waits for the compiler.
3. No NaN or infinity reaches these loops; "cannot" is the finite number `FAR`.
4. No reassociation: `solve_block` looks for the very number that it found as a minimum.
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


def _compiled(function: _F) -> _F:
    fast = {"nnan", "ninf", "nsz", "arcp", "contract"}
    return cast("_F", numba.njit(fastmath=fast, error_model="numpy", nogil=True, cache=True)(function))


@_compiled
def rbf_rows_single(
    dots: NDArray[np.float32],
    left_squares: NDArray[np.float32],
    right_squares: NDArray[np.float32],
    gamma: float,
    out: NDArray[np.float32],
    slots: NDArray[np.int64],
    first: int,
) -> None:
    """Write exp(-gamma * |w - x|^2) into `out[slots, first:first + N]`, in single precision.

    Args:
        dots: <w, x>, shape (M, N).
        left_squares: |w|^2, shape (M,).
        right_squares: |x|^2, shape (N,).
        gamma: Of the kernel.
        out: Kernel rows, shape (R, C).
        slots: Which rows of `out`, shape (M,).
        first: The first column to write.
    """
    M, N = dots.shape
    scale = _f32(2.0 * gamma * _LOG2_E)
    half = _f32(-gamma * _LOG2_E)
    bits = np.empty(N, np.int32)
    power = bits.view(np.float32)
    p = np.empty(N, np.float32)
    for k in range(M):
        w = half * left_squares[k]
        G = dots[k]
        o = out[slots[k], first : first + N]
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


@_compiled
def rbf_rows_double(
    dots: NDArray[np.float64],
    left_squares: NDArray[np.float64],
    right_squares: NDArray[np.float64],
    gamma: float,
    out: NDArray[np.float64],
    slots: NDArray[np.int64],
    first: int,
) -> None:
    """As `rbf_rows_single`, in double precision."""
    M, N = dots.shape
    scale = 2.0 * gamma * _LOG2_E
    half = -gamma * _LOG2_E
    bits = np.empty(N, np.int64)
    power = bits.view(np.float64)
    p = np.empty(N, np.float64)
    for k in range(M):
        w = half * left_squares[k]
        G = dots[k]
        o = out[slots[k], first : first + N]
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


@_compiled
def copy_rows(dots: NDArray[Any], out: NDArray[Any], slots: NDArray[np.int64], first: int) -> None:
    """Write `dots`, shape (M, N), into `out[slots, first:first + N]`."""
    M, N = dots.shape
    for k in range(M):
        o = out[slots[k], first : first + N]
        G = dots[k]
        for t in range(N):
            o[t] = G[t]


@_compiled
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


@_compiled
def pick(rows: NDArray[Any], slots: NDArray[np.int64], columns: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Write rows[slots[i], columns[j]] to out[i, j]."""
    for i in range(len(slots)):
        a = rows[slots[i]]
        o = out[i]
        for j in range(len(columns)):
            o[j] = a[columns[j]]


@_compiled
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


@_compiled
def solve_block(
    K: NDArray[Any],
    f: NDArray[np.float64],
    beta: NDArray[np.float64],
    lower: NDArray[np.float64],
    upper: NDArray[np.float64],
    tolerance: float,
    max_steps: int,
) -> int:
    """Minimise over the working set by sequential minimal optimization; changes `f` and `beta`.

    Args:
        K: Kernel values among the variables, shape (Q, Q padded to LANES), zero in the padding.
        f: Gradient, shape (Q,).
        beta: Signed coefficients, shape (Q,).
        lower: Least coefficients.
        upper: Largest coefficients.
        tolerance: Stop when the largest violation is below it.
        max_steps: Stop after as many pair updates.

    Returns:
        The number of pair updates.

    Source:
        Fan, Chen & Lin 2005, "Working set selection using second order information", WSS 2: i by the largest
        violation, j by the largest decrease of the objective. The loops are cut into lanes.
    """
    Q, padded = len(beta), K.shape[1]
    num_blocks = padded // LANES
    F = np.zeros(padded)
    closed_up = np.full(padded, FAR)
    closed_down = np.full(padded, -FAR)
    diagonal = np.ones(padded)
    gain = np.zeros(padded)
    for k in range(Q):
        F[k] = f[k]
        diagonal[k] = K[k, k]
        if beta[k] < upper[k]:
            closed_up[k] = 0.0
        if beta[k] > lower[k]:
            closed_down[k] = 0.0
    least = np.empty(LANES)
    most = np.empty(LANES)
    i, j, delta = 0, 0, 0.0
    steps = 0
    while steps < max_steps:
        for lane in range(LANES):
            least[lane] = FAR
            most[lane] = -FAR
        Ki, Kj = K[i], K[j]
        for s in range(num_blocks):
            at = s * LANES
            x, y, g = Ki[at : at + LANES], Kj[at : at + LANES], F[at : at + LANES]
            cu, cd = closed_up[at : at + LANES], closed_down[at : at + LANES]
            for lane in range(LANES):
                t = g[lane] + delta * (_f64(x[lane]) - _f64(y[lane]))
                g[lane] = t
                a = t + cu[lane]
                b = t + cd[lane]
                least[lane] = min(least[lane], a)
                most[lane] = max(most[lane], b)
        m, M, at_lane = FAR, -FAR, 0
        for lane in range(LANES):
            if least[lane] < m:
                m = least[lane]
                at_lane = lane
            M = max(M, most[lane])
        if M - m < tolerance:
            break
        i = at_lane
        while F[i] + closed_up[i] != m:
            i += LANES
        Ki, di = K[i], diagonal[i]
        for lane in range(LANES):
            most[lane] = 0.0
        for s in range(num_blocks):
            at = s * LANES
            x, g, d = Ki[at : at + LANES], F[at : at + LANES], diagonal[at : at + LANES]
            cd, h = closed_down[at : at + LANES], gain[at : at + LANES]
            for lane in range(LANES):
                t = g[lane] + cd[lane] - m
                t = max(0.0, t)
                curvature = di + d[lane] - 2.0 * _f64(x[lane])
                curvature = max(1e-12, curvature)
                t = t * t / curvature
                h[lane] = t
                most[lane] = max(most[lane], t)
        best = 0.0
        for lane in range(LANES):
            if most[lane] > best:
                best = most[lane]
                at_lane = lane
        if best <= 0.0:
            break
        j = at_lane
        while gain[j] != best:
            j += LANES
        curvature = max(di + diagonal[j] - 2.0 * _f64(Ki[j]), 1e-12)
        room_i, room_j = upper[i] - beta[i], beta[j] - lower[j]
        delta = min((F[j] - m) / curvature, room_i, room_j)
        # Exactly at the bound, or rounding would leave a variable an unusable sliver away from it.
        beta[i] = upper[i] if delta == room_i else beta[i] + delta
        beta[j] = lower[j] if delta == room_j else beta[j] - delta
        closed_up[i] = 0.0 if beta[i] < upper[i] else FAR
        closed_down[i] = 0.0 if beta[i] > lower[i] else -FAR
        closed_up[j] = 0.0 if beta[j] < upper[j] else FAR
        closed_down[j] = 0.0 if beta[j] > lower[j] else -FAR
        steps += 1
    for k in range(Q):
        f[k] = F[k]
    return steps


@_compiled
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
