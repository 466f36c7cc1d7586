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
        F: Gradients, shape (S * P,), in the precision of the kernel rows.
        beta: Signed coefficients, shape (S * P,).
        lower: Least coefficients; a variable whose bounds are equal takes no part.
        upper: Largest coefficients.
        diagonal: Kernel values of each sample with itself, shape (P,), in that precision.
    """

    F: NDArray[Any]
    beta: NDArray[np.float64]
    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    diagonal: NDArray[Any]


@compiled
def _follow(
    F: NDArray[Any],
    closed_up: NDArray[Any],
    closed_down: NDArray[Any],
    Ki: NDArray[Any],
    Kj: NDArray[Any],
    delta: Any,
    least: NDArray[Any],
    most: NDArray[Any],
) -> None:
    """Add delta * (Ki - Kj) to the gradient, and lower and raise the lanes' extremes on the way."""
    for s in range(len(F)):
        x, y, g, cu, cd = Ki[s], Kj[s], F[s], closed_up[s], closed_down[s]
        for lane in range(LANES):
            t = g[lane] + delta * (x[lane] - y[lane])
            g[lane] = t
            a = t + cu[lane]
            b = t + cd[lane]
            least[lane] = min(least[lane], a)
            most[lane] = max(most[lane], b)


@compiled
def _gains(
    F: NDArray[Any],
    closed_down: NDArray[Any],
    Ki: NDArray[Any],
    diagonal: NDArray[Any],
    least: Any,
    di: Any,
    gain: NDArray[Any],
    most: NDArray[Any],
) -> None:
    """By how much (twice) every variable would lower the objective as partner of i; raises the lanes' maxima."""
    zero, two, least_curvature = F.dtype.type(0), F.dtype.type(2), F.dtype.type(LEAST_CURVATURE)
    for s in range(len(F)):
        x, g, d, cd, h = Ki[s], F[s], diagonal[s], closed_down[s], gain[s]
        for lane in range(LANES):
            t = g[lane] + cd[lane] - least
            t = max(zero, t)
            curvature = di + d[lane] - two * x[lane]
            curvature = max(least_curvature, curvature)
            t = t * t / curvature
            h[lane] = t
            most[lane] = max(most[lane], t)


@compiled
def _least_of(lanes: NDArray[Any]) -> Any:
    """The smallest; four chains of comparisons, for each waits for the one before."""
    a, b, c, d = lanes[0], lanes[1], lanes[2], lanes[3]
    for k in range(4, LANES, 4):
        a, b, c, d = min(a, lanes[k]), min(b, lanes[k + 1]), min(c, lanes[k + 2]), min(d, lanes[k + 3])
    return min(a, b, c, d)


@compiled
def _largest_of(lanes: NDArray[Any]) -> Any:
    """The largest."""
    a, b, c, d = lanes[0], lanes[1], lanes[2], lanes[3]
    for k in range(4, LANES, 4):
        a, b, c, d = max(a, lanes[k]), max(b, lanes[k + 1]), max(c, lanes[k + 2]), max(d, lanes[k + 3])
    return max(a, b, c, d)


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
    num_rows, P = store.rows.shape
    S = len(F) // P
    number = F.dtype
    zero, far = number.type(0), number.type(FAR)
    closed_up, closed_down, gain = np.full(S * P, far), np.full(S * P, -far), np.zeros(S * P, number)
    for v in range(S * P):
        if beta[v] < upper[v]:
            closed_up[v] = zero
        if beta[v] > lower[v]:
            closed_down[v] = zero
    # In lanes: (side, lanes of a side, lane).
    form = (S, P // LANES, LANES)
    rows, by_lane, d = store.rows.reshape((num_rows, *form[1:])), F.reshape(form), diagonal.reshape(form[1:])
    ups, downs, gains = closed_up.reshape(form), closed_down.reshape(form), gain.reshape(form)
    least, most = np.empty(LANES, number), np.empty(LANES, number)
    i, j, delta, steps, num_values, decrease = 0, 0, 0.0, 0, 0, 0.0
    Ki = Kj = np.zeros(form[1:], number)
    while True:
        for lane in range(LANES):
            least[lane] = far
            most[lane] = -far
        for s in range(S):
            _follow(by_lane[s], ups[s], downs[s], Ki, Kj, number.type(delta), least, most)
        m, M = _least_of(least), _largest_of(most)
        if M - m < tolerance or steps >= max_steps:
            break
        i = 0
        while least[i] != m:
            i += 1
        while F[i] + closed_up[i] != m:
            i += LANES
        slot, new = fetch(source, store, i % P, -1)
        num_values += new
        Ki, di = rows[slot], diagonal[i % P]
        for lane in range(LANES):
            most[lane] = zero
        for s in range(S):
            _gains(by_lane[s], downs[s], Ki, d, m, di, gains[s], most)
        best = _largest_of(most)
        if best <= 0.0:
            break
        j = 0
        while most[j] != best:
            j += 1
        while gain[j] != best:
            j += LANES
        other, new = fetch(source, store, j % P, slot)
        num_values += new
        Kj = rows[other]
        curvature = max(_f64(di) + diagonal[j % P] - 2.0 * store.rows[slot, j % P], LEAST_CURVATURE)
        slope = _f64(F[j]) - m
        room_i, room_j = upper[i] - beta[i], beta[j] - lower[j]
        delta = min(slope / curvature, room_i, room_j)
        # Exactly at the bound, or rounding would leave a variable an unusable sliver away from it.
        old_i, old_j = beta[i], beta[j]
        beta[i] = upper[i] if delta == room_i else beta[i] + delta
        beta[j] = lower[j] if delta == room_j else beta[j] - delta
        if beta[i] == old_i and beta[j] == old_j:
            break
        decrease += delta * (slope - 0.5 * delta * curvature)
        closed_up[i] = zero if beta[i] < upper[i] else far
        closed_down[i] = zero if beta[i] > lower[i] else -far
        closed_up[j] = zero if beta[j] < upper[j] else far
        closed_down[j] = zero if beta[j] > lower[j] else -far
        steps += 1
    return steps, decrease, num_values
