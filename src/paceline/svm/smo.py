"""Sequential minimal optimization, one pair of variables an update, kernel rows computed when first needed: compiled.

It solves working sets and small problems: whatever has a gradient that stays in the processor's cache.

Rules
1. i by the largest violation, j by the largest decrease of the objective (Fan, Chen & Lin 2005, "Working set selection
   using second order information", WSS 2).
2. The two passes over all variables run in lanes (`compiled.py`, rule 1), and no reassociation is allowed: the number
   that was found as a minimum is looked for again.
3. Every update strictly decreases the objective, or, where rounding swallows it, ends the loop.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.svm.compiled import FAR, LANES, compiled
from paceline.svm.kernel_row import Source
from paceline.svm.row_store import RowStore, fetch

_f64 = np.float64
LEAST_CURVATURE = 1e-12


class Variables(NamedTuple):
    """S variables for each of some samples, padded to P, a multiple of LANES, with zeros.

    Attributes:
        F: Gradients, shape (S * P,).
        beta: Signed coefficients, shape (S * P,).
        lower: Least coefficients; a variable whose bounds are equal takes no part.
        upper: Largest coefficients.
        diagonal: Kernel values of each sample with itself, shape (P,).
    """

    F: NDArray[np.float64]
    beta: NDArray[np.float64]
    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    diagonal: NDArray[np.float64]


@compiled
def _follow(
    F: NDArray[np.float64],
    closed_up: NDArray[np.float64],
    closed_down: NDArray[np.float64],
    Ki: NDArray[Any],
    Kj: NDArray[Any],
    delta: float,
    least: NDArray[np.float64],
    most: NDArray[np.float64],
) -> None:
    """Add delta * (Ki - Kj) to the gradient, and lower and raise the lanes' extremes on the way."""
    for s in range(len(F) // LANES):
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


@compiled
def _gains(
    F: NDArray[np.float64],
    closed_down: NDArray[np.float64],
    Ki: NDArray[Any],
    diagonal: NDArray[np.float64],
    least: float,
    di: float,
    gain: NDArray[np.float64],
    most: NDArray[np.float64],
) -> None:
    """By how much (twice) every variable would lower the objective as partner of i; raises the lanes' maxima."""
    for s in range(len(F) // LANES):
        at = s * LANES
        x, g, d = Ki[at : at + LANES], F[at : at + LANES], diagonal[at : at + LANES]
        cd, h = closed_down[at : at + LANES], gain[at : at + LANES]
        for lane in range(LANES):
            t = g[lane] + cd[lane] - least
            t = max(0.0, t)
            curvature = di + d[lane] - 2.0 * _f64(x[lane])
            curvature = max(LEAST_CURVATURE, curvature)
            t = t * t / curvature
            h[lane] = t
            most[lane] = max(most[lane], t)


@compiled
def solve(
    source: Source, store: RowStore, variables: Variables, tolerance: float, max_steps: int
) -> tuple[int, float, int]:
    """Run until the largest violation is below `tolerance`, or for `max_steps`; may be called again to go on.

    Args:
        source: Samples and kernel.
        store: Their kernel rows, as far as known.
        variables: `F` and `beta` are changed.
        tolerance: As above.
        max_steps: Pair updates.

    Returns:
        Pair updates, by how much they lowered the objective, and the number of kernel values computed.
    """
    F, beta, lower, upper, diagonal = variables
    rows = store.rows
    P = rows.shape[1]
    S = len(F) // P
    closed_up, closed_down, gain = np.full(S * P, FAR), np.full(S * P, -FAR), np.zeros(S * P)
    for v in range(S * P):
        if beta[v] < upper[v]:
            closed_up[v] = 0.0
        if beta[v] > lower[v]:
            closed_down[v] = 0.0
    least, most = np.empty(LANES), np.empty(LANES)
    i, j, delta, steps, num_values, decrease = 0, 0, 0.0, 0, 0, 0.0
    Ki = Kj = np.zeros(P, rows.dtype)
    while True:
        for lane in range(LANES):
            least[lane] = FAR
            most[lane] = -FAR
        for s in range(S):
            at = slice(s * P, (s + 1) * P)
            _follow(F[at], closed_up[at], closed_down[at], Ki, Kj, delta, least, most)
        m, M, at_lane = FAR, -FAR, 0
        for lane in range(LANES):
            if least[lane] < m:
                m = least[lane]
                at_lane = lane
            M = max(M, most[lane])
        if M - m < tolerance or steps >= max_steps:
            break
        i = at_lane
        while F[i] + closed_up[i] != m:
            i += LANES
        slot, new = fetch(source, store, i % P, -1)
        num_values += new
        Ki, di = rows[slot], diagonal[i % P]
        for lane in range(LANES):
            most[lane] = 0.0
        for s in range(S):
            at = slice(s * P, (s + 1) * P)
            _gains(F[at], closed_down[at], Ki, diagonal, m, di, gain[at], most)
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
        other, new = fetch(source, store, j % P, slot)
        num_values += new
        Kj = rows[other]
        curvature = max(di + diagonal[j % P] - 2.0 * _f64(Ki[j % P]), LEAST_CURVATURE)
        room_i, room_j = upper[i] - beta[i], beta[j] - lower[j]
        delta = min((F[j] - m) / curvature, room_i, room_j)
        # Exactly at the bound, or rounding would leave a variable an unusable sliver away from it.
        old_i, old_j = beta[i], beta[j]
        beta[i] = upper[i] if delta == room_i else beta[i] + delta
        beta[j] = lower[j] if delta == room_j else beta[j] - delta
        if beta[i] == old_i and beta[j] == old_j:
            break
        decrease += delta * ((F[j] - m) - 0.5 * delta * curvature)
        closed_up[i] = 0.0 if beta[i] < upper[i] else FAR
        closed_down[i] = 0.0 if beta[i] > lower[i] else -FAR
        closed_up[j] = 0.0 if beta[j] < upper[j] else FAR
        closed_down[j] = 0.0 if beta[j] > lower[j] else -FAR
        steps += 1
    return steps, decrease, num_values
