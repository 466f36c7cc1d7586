"""Sequential minimal optimization of a whole small problem, kernel rows computed when they are first needed: compiled.

What LIBSVM does, in lanes, in double precision throughout, and without shrinking: a small problem's gradient stays in
the processor's cache.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.svm.compiled import FAR, LANES, compiled
from paceline.svm.kernel_row import Source, diagonal_value, kernel_row
from paceline.svm.smo import LEAST_CURVATURE, follow, gains


@compiled
def solve_on_demand(
    source: Source,
    bounds: tuple[int, int, int, int],
    shared: NDArray[np.float64],
    shared_slot: NDArray[np.int64],
    num_shared: NDArray[np.int64],
    rows: NDArray[np.float64],
    owner: NDArray[np.int64],
    slot_of: NDArray[np.int64],
    next_slot: NDArray[np.int64],
    diagonal: NDArray[np.float64],
    F: NDArray[np.float64],
    beta: NDArray[np.float64],
    lower: NDArray[np.float64],
    upper: NDArray[np.float64],
    tolerance: float,
    max_steps: int,
) -> tuple[int, float, int]:
    """Run until the largest violation is below `tolerance`, or for `max_steps`; may be called again to go on.

    Args:
        source: Samples and kernel.
        bounds: (a, b, c, d): the problem's samples are a to b and c to d (exclusive) of the source.
        shared: Kernel rows of samples with their own of the two ranges, kept for other problems, shape (M, width).
        shared_slot: By sample of the source, row of `shared` or -1.
        num_shared: How many rows of `shared` are used, shape (1,).
        rows: Kernel rows of this problem, shape (R >= 3, P); P is the number of samples padded to LANES.
        owner: Sample of this problem in each row of `rows`, or -1.
        slot_of: By sample of this problem, row of `rows` or -1.
        next_slot: Where the next row goes, shape (1,).
        diagonal: Kernel values of each sample with itself, shape (P,).
        F: Gradients of S variables a sample, shape (S * P,); this and those below are padded with zeros.
        beta: Coefficients; changed, as F is.
        lower: Least coefficients.
        upper: Largest coefficients.
        tolerance: As above.
        max_steps: Pair updates.

    Returns:
        Pair updates, the largest violation, and the number of kernel values computed.
    """
    P = rows.shape[1]
    S = len(F) // P
    closed_up, closed_down, gain = np.full(S * P, FAR), np.full(S * P, -FAR), np.zeros(S * P)
    for v in range(S * P):
        if beta[v] < upper[v]:
            closed_up[v] = 0.0
        if beta[v] > lower[v]:
            closed_down[v] = 0.0
    least, most = np.empty(LANES), np.empty(LANES)
    i, j, delta, steps, num_values = 0, 0, 0.0, 0, 0
    Ki = Kj = np.zeros(P)
    while True:
        for lane in range(LANES):
            least[lane] = FAR
            most[lane] = -FAR
        for s in range(S):
            at = slice(s * P, (s + 1) * P)
            follow(F[at], closed_up[at], closed_down[at], Ki, Kj, delta, least, most)
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
        slot, new = _fetch(
            source, bounds, shared, shared_slot, num_shared, rows, owner, slot_of, next_slot, i % P, -1
        )
        num_values += new
        Ki, di = rows[slot], diagonal[i % P]
        for lane in range(LANES):
            most[lane] = 0.0
        for s in range(S):
            at = slice(s * P, (s + 1) * P)
            gains(F[at], closed_down[at], Ki, diagonal, m, di, gain[at], most)
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
        other, new = _fetch(
            source, bounds, shared, shared_slot, num_shared, rows, owner, slot_of, next_slot, j % P, slot
        )
        num_values += new
        Kj = rows[other]
        curvature = max(di + diagonal[j % P] - 2.0 * Ki[j % P], LEAST_CURVATURE)
        room_i, room_j = upper[i] - beta[i], beta[j] - lower[j]
        delta = min((F[j] - m) / curvature, room_i, room_j)
        old_i, old_j = beta[i], beta[j]
        beta[i] = upper[i] if delta == room_i else beta[i] + delta
        beta[j] = lower[j] if delta == room_j else beta[j] - delta
        if beta[i] == old_i and beta[j] == old_j:
            break
        closed_up[i] = 0.0 if beta[i] < upper[i] else FAR
        closed_down[i] = 0.0 if beta[i] > lower[i] else -FAR
        closed_up[j] = 0.0 if beta[j] < upper[j] else FAR
        closed_down[j] = 0.0 if beta[j] > lower[j] else -FAR
        steps += 1
    return steps, M - m, num_values


@compiled
def _fetch(
    source: Source,
    bounds: tuple[int, int, int, int],
    shared: NDArray[np.float64],
    shared_slot: NDArray[np.int64],
    num_shared: NDArray[np.int64],
    rows: NDArray[np.float64],
    owner: NDArray[np.int64],
    slot_of: NDArray[np.int64],
    next_slot: NDArray[np.int64],
    t: int,
    needed: int,
) -> tuple[int, int]:
    """The slot of a sample's kernel row, and how many values had to be computed; slot `needed` stays as it is."""
    if slot_of[t] >= 0:
        return slot_of[t], 0
    a, b, c, d = bounds
    slot = next_slot[0]
    if slot == needed:
        slot = (slot + 1) % len(owner)
    next_slot[0] = (slot + 1) % len(owner)
    if owner[slot] >= 0:
        slot_of[owner[slot]] = -1
    owner[slot] = t
    slot_of[t] = slot
    row = rows[slot]
    n_a, n = b - a, (b - a) + (d - c)
    is_first = t < n_a
    p = a + t if is_first else c + t - n_a
    own, own_first, own_last = (row[:n_a], a, b) if is_first else (row[n_a:n], c, d)
    for k in range(n, len(row)):
        row[k] = 0.0
    num_values = 0
    if shared_slot[p] >= 0:
        known = shared[shared_slot[p]]
        for k in range(len(own)):
            own[k] = known[k]
    else:
        kernel_row(source, p, own_first, own_last, own)
        num_values += len(own)
        if num_shared[0] < len(shared):
            shared_slot[p] = num_shared[0]
            known = shared[num_shared[0]]
            for k in range(len(own)):
                known[k] = own[k]
            num_shared[0] += 1
    if d > c:
        if is_first:
            kernel_row(source, p, c, d, row[n_a:n])
        else:
            kernel_row(source, p, a, b, row[:n_a])
        num_values += n - len(own)
    return slot, num_values


@compiled
def diagonal_of(source: Source, out: NDArray[np.float64]) -> None:
    """Write the kernel values of every sample with itself to `out`, shape (N,)."""
    for i in range(len(out)):
        out[i] = diagonal_value(source, i)


@compiled
def gradients_from_rows(
    source: Source,
    bounds: tuple[int, int, int, int],
    rows: NDArray[np.float64],
    slot_of: NDArray[np.int64],
    weights: NDArray[np.float64],
    g: NDArray[np.float64],
) -> int:
    """Write the sum of all kernel rows times weights to `g`, shape (P,); returns how many values were computed."""
    a, b, c, d = bounds
    n_a, n = b - a, (b - a) + (d - c)
    spare = np.zeros(len(g))
    num_values = 0
    for t in range(len(g)):
        g[t] = 0.0
    for t in range(n):
        weight = weights[t]
        if weight == 0.0:
            continue
        if slot_of[t] >= 0:
            row = rows[slot_of[t]]
        else:
            row = spare
            p = a + t if t < n_a else c + t - n_a
            kernel_row(source, p, a, b, row[:n_a])
            if d > c:
                kernel_row(source, p, c, d, row[n_a:n])
            num_values += n
        for k in range(n):
            g[k] += weight * row[k]
    return num_values
