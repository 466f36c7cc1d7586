"""Sequential minimal optimization (SMO): compiled pair updates on kernel rows that are fetched when first needed.

It solves working sets and small problems: whatever has a gradient that stays in the processor's cache.

Rules
1. Variable i has the largest violation, j the largest decrease of the objective. That is WSS 2 of Fan, Chen & Lin 2005,
   "Working set selection using second order information".
2. The two passes over all variables run in SIMD lanes (`compiled.py`, rule 1), without reassociation. Otherwise the
   number that was found as a minimum would not be found again.
3. Every update strictly decreases the objective, or, where rounding swallows it, ends the loop.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline_svm.compiled import FAR, LANES, compiled, hot, inner
from paceline_svm.kernel_rows import RowStore, Source, fetch

LEAST_CURVATURE = 1e-12
_f64 = np.float64


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


class LaneArrays(NamedTuple):
    """The arrays that the two passes over all variables read and write, in SIMD lanes: S sides of L times LANES.

    Attributes:
        rows: Kernel rows, shape (R, L, LANES).
        slot_of: Which row is a sample's, or -1; shape (samples,).
        F: Gradients, shape (S, L, LANES).
        closed_up: What is added so that a variable which may not grow is never the least; shape (S, L, LANES).
        closed_down: Likewise for those that may not shrink.
        gains: Scratch, shape (S, L, LANES).
        diagonal: Shape (L, LANES).
        least: Scratch, shape (LANES,).
        most: Scratch, shape (LANES,).
    """

    rows: NDArray[Any]
    slot_of: NDArray[np.int64]
    F: NDArray[Any]
    closed_up: NDArray[Any]
    closed_down: NDArray[Any]
    gains: NDArray[Any]
    diagonal: NDArray[Any]
    least: NDArray[Any]
    most: NDArray[Any]


class LaneMemory(NamedTuple):
    """The arrays that a problem needs besides `LaneArrays`, without lanes.

    Attributes:
        closed_up: Shape (S * P,), as the next two.
        closed_down: See `LaneArrays`.
        gains: Scratch.
        least: Scratch, shape (LANES,).
        most: Scratch, shape (LANES,).
    """

    closed_up: NDArray[Any]
    closed_down: NDArray[Any]
    gains: NDArray[Any]
    least: NDArray[Any]
    most: NDArray[Any]


def lane_memory(num: int, dtype: Any) -> LaneMemory:
    """Allocate for `num` variables, padding included."""
    sizes = num, num, num, LANES, LANES
    return LaneMemory(*(np.empty(size, dtype) for size in sizes))


@inner
def lanes_of(store: RowStore, variables: Variables, memory: LaneMemory) -> LaneArrays:
    """Return the same memory in SIMD lanes, and write which variables are closed. Python calls it as `py_func`."""
    P = store.rows.shape[1]
    S, L = len(variables.F) // P, P // LANES
    return LaneArrays(
        store.rows.reshape((len(store.rows), L, LANES)),
        store.slot_of,
        variables.F.reshape((S, L, LANES)),
        memory.closed_up.reshape((S, L, LANES)),
        memory.closed_down.reshape((S, L, LANES)),
        memory.gains.reshape((S, L, LANES)),
        variables.diagonal.reshape((L, LANES)),
        memory.least,
        memory.most,
    )


def _solve(
    source: Source,
    store: RowStore,
    variables: Variables,
    lanes: LaneArrays,
    memory: LaneMemory,
    tolerance: float,
    max_steps: int,
) -> tuple[int, float, int]:
    """Run until the largest violation is below `tolerance`, or for `max_steps`; may be called again to go on.

    Args:
        source: Samples and kernel.
        store: Their kernel rows, as far as known.
        variables: `F` and `beta` are changed.
        lanes: `lanes_of` these; changed.
        memory: What they were made of; changed.
        tolerance: As above.
        max_steps: Pair updates.

    Returns:
        Pair updates, by how much they lowered the objective, and the number of kernel values computed.
    """
    number = variables.F.dtype
    zero, far = number.type(0), number.type(FAR)
    for v in range(len(variables.F)):
        memory.closed_up[v] = zero if variables.beta[v] < variables.upper[v] else far
        memory.closed_down[v] = zero if variables.beta[v] > variables.lower[v] else -far
        memory.gains[v] = zero
    steps, decrease, num_values = 0, 0.0, 0
    while True:
        done, by, missing = _update_pairs(lanes, variables, memory, store.rows, tolerance, max_steps - steps)
        steps += done
        decrease += by
        if missing < 0:
            return steps, decrease, num_values
        num_values += fetch(source, store, missing)


solve = compiled(_solve)
solve_inside = inner(_solve)  # for compiled code


@inner
def _update_pairs(
    lanes: LaneArrays,
    variables: Variables,
    memory: LaneMemory,
    rows: NDArray[Any],
    tolerance: float,
    max_steps: int,
) -> tuple[int, float, int]:
    """Run to the end, or until a kernel row is missing.

    Args:
        lanes: What the passes read and write, in SIMD lanes.
        variables: The same memory without lanes, and the rest.
        memory: The lanes' memory without lanes.
        rows: Kernel rows without lanes.
        tolerance: As in `solve`.
        max_steps: Pair updates.

    Returns:
        Pair updates, by how much they lowered the objective, and the sample whose row is missing or -1. An update needs
        two rows, and both are looked for again, so there must be room for two that are fetched one after the other.
    """
    F, slot_of = variables.F, lanes.slot_of
    diagonal, P = variables.diagonal, len(variables.diagonal)
    delta, steps, decrease = 0.0, 0, 0.0
    Ki = Kj = lanes.rows[0]
    while True:
        m, M = _extremes_after(lanes, Ki, Kj, delta)
        if M - m < tolerance or steps >= max_steps:
            return steps, decrease, -1
        i = 0
        while lanes.least[i] != m:
            i += 1
        while F[i] + memory.closed_up[i] != m:
            i += LANES
        slot = slot_of[i % P]
        if slot < 0:
            return steps, decrease, i % P
        Ki, di = lanes.rows[slot], diagonal[i % P]
        j = _partner(lanes, memory.gains, Ki, m, di)
        if j < 0:
            return steps, decrease, -1
        other = slot_of[j % P]
        if other < 0:
            return steps, decrease, j % P
        Kj = lanes.rows[other]
        curvature = _f64(di) + diagonal[j % P] - 2.0 * rows[slot, j % P]
        if curvature < LEAST_CURVATURE:
            curvature = LEAST_CURVATURE
        slope = _f64(F[j]) - m
        delta = _move(variables, memory, i, j, slope / curvature)
        if delta == 0.0:
            return steps, decrease, -1
        decrease += delta * (slope - 0.5 * delta * curvature)
        steps += 1


@inner
def _extremes_after(lanes: LaneArrays, Ki: NDArray[Any], Kj: NDArray[Any], delta: float) -> tuple[Any, Any]:
    """Let the gradient follow the last update, if any; the least that may grow, and the largest that may shrink."""
    number = lanes.F.dtype
    least, most, far = lanes.least, lanes.most, number.type(FAR)
    for lane in range(LANES):
        least[lane] = far
        most[lane] = -far
    for s in range(len(lanes.F)):
        F, closed_up, closed_down = lanes.F[s], lanes.closed_up[s], lanes.closed_down[s]
        if delta == 0.0:  # before the first update: the rows may not have been written
            extremes(F, closed_up, closed_down, least, most)
        else:
            follow(F, closed_up, closed_down, Ki, Kj, number.type(delta), least, most)
    return least_of(least), largest_of(most)


@inner
def _partner(lanes: LaneArrays, gain: NDArray[Any], Ki: NDArray[Any], least: Any, di: Any) -> int:
    """Return the variable with which i lowers the objective most; -1 if there is none.

    Args:
        lanes: Of all variables.
        gain: `lanes.gains` without lanes.
        Ki: Kernel row of i.
        least: Its gradient.
        di: Its kernel value with itself.
    """
    most, zero = lanes.most, lanes.F.dtype.type(0)
    for lane in range(LANES):
        most[lane] = zero
    for s in range(len(lanes.F)):
        gains(lanes.F[s], lanes.closed_down[s], Ki, lanes.diagonal, least, di, lanes.gains[s], most)
    best = largest_of(most)
    if best <= zero:
        return -1
    j = 0
    while most[j] != best:
        j += 1
    while gain[j] != best:
        j += LANES
    return j


@inner
def _move(variables: Variables, memory: LaneMemory, i: int, j: int, wanted: float) -> float:
    """Let i grow and j shrink, as far as wanted or their bounds; returns by how much, 0 if rounding swallows it."""
    beta, lower, upper = variables.beta, variables.lower, variables.upper
    zero, far = variables.F.dtype.type(0), variables.F.dtype.type(FAR)
    room_i, room_j = upper[i] - beta[i], beta[j] - lower[j]
    delta = wanted
    if room_i < delta:
        delta = room_i
    if room_j < delta:
        delta = room_j
    # Exactly at the bound, or rounding would leave a variable an unusable sliver away from it.
    old_i, old_j = beta[i], beta[j]
    beta[i] = upper[i] if delta == room_i else beta[i] + delta
    beta[j] = lower[j] if delta == room_j else beta[j] - delta
    if beta[i] == old_i and beta[j] == old_j:
        return 0.0
    memory.closed_up[i] = zero if beta[i] < upper[i] else far
    memory.closed_down[i] = zero if beta[i] > lower[i] else -far
    memory.closed_up[j] = zero if beta[j] < upper[j] else far
    memory.closed_down[j] = zero if beta[j] > lower[j] else -far
    return delta


@hot
def extremes(
    F: NDArray[Any],
    closed_up: NDArray[Any],
    closed_down: NDArray[Any],
    least: NDArray[Any],
    most: NDArray[Any],
) -> None:
    """Lower and raise the lanes' extremes to those of the gradient."""
    for s in range(len(F)):
        g, cu, cd = F[s], closed_up[s], closed_down[s]
        for lane in range(LANES):
            least[lane] = min(least[lane], g[lane] + cu[lane])
            most[lane] = max(most[lane], g[lane] + cd[lane])


@hot
def follow(
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


@hot
def gains(
    F: NDArray[Any],
    closed_down: NDArray[Any],
    Ki: NDArray[Any],
    diagonal: NDArray[Any],
    least: Any,
    di: Any,
    gain: NDArray[Any],
    most: NDArray[Any],
) -> None:
    """Compute how much (twice) every variable would lower the objective as partner of i; raises the lanes' maxima."""
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


@hot
def least_of(lanes: NDArray[Any]) -> Any:
    """Return the smallest lane. It takes four chains of comparisons, because each waits for its own last result."""
    a, b, c, d = lanes[0], lanes[1], lanes[2], lanes[3]
    for k in range(4, LANES, 4):
        a, b, c, d = min(a, lanes[k]), min(b, lanes[k + 1]), min(c, lanes[k + 2]), min(d, lanes[k + 3])
    return min(a, b, c, d)


@hot
def largest_of(lanes: NDArray[Any]) -> Any:
    """Return the largest lane."""
    a, b, c, d = lanes[0], lanes[1], lanes[2], lanes[3]
    for k in range(4, LANES, 4):
        a, b, c, d = max(a, lanes[k]), max(b, lanes[k + 1]), max(c, lanes[k + 2]), max(d, lanes[k + 3])
    return max(a, b, c, d)
