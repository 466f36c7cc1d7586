"""Sequential minimal optimization of the variables of a working set: the compiled loop, one pair an update.

Rules
1. i by the largest violation, j by the largest decrease of the objective (Fan, Chen & Lin 2005, "Working set selection
   using second order information", WSS 2).
2. The two passes over all variables run in lanes (`compiled.py`, rule 1), and no reassociation is allowed: the number
   that was found as a minimum is looked for again.
3. Every update strictly decreases the objective, or, where rounding swallows it, ends the loop.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.svm.compiled import FAR, LANES, compiled

_f64 = np.float64
LEAST_CURVATURE = 1e-12


@compiled
def follow(
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
def gains(
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
def solve_block(
    K: NDArray[Any],
    f: NDArray[np.float64],
    beta: NDArray[np.float64],
    lower: NDArray[np.float64],
    upper: NDArray[np.float64],
    tolerance: float,
    max_steps: int,
) -> tuple[int, float]:
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
        The number of pair updates, and by how much they lowered the objective.
    """
    Q, padded = len(beta), K.shape[1]
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
    steps, decrease = 0, 0.0
    while True:
        for lane in range(LANES):
            least[lane] = FAR
            most[lane] = -FAR
        Ki, Kj = K[i], K[j]
        follow(F, closed_up, closed_down, Ki, Kj, delta, least, most)
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
        Ki, di = K[i], diagonal[i]
        for lane in range(LANES):
            most[lane] = 0.0
        gains(F, closed_down, Ki, diagonal, m, di, gain, most)
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
        curvature = max(di + diagonal[j] - 2.0 * _f64(Ki[j]), LEAST_CURVATURE)
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
    for k in range(Q):
        f[k] = F[k]
    return steps, decrease
