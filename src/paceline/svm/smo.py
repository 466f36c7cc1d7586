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

from paceline.svm.compiled import FAR, LANES, borrowing, compiled
from paceline.svm.kernel_row import Source
from paceline.svm.passes import LEAST_CURVATURE, Board, extremes, follow, gains, largest_of, least_of
from paceline.svm.row_store import RowStore, fetch

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
    board = Board(
        store.rows.reshape((num_rows, *form[1:])),
        store.slot_of,
        F.reshape(form),
        closed_up.reshape(form),
        closed_down.reshape(form),
        gain.reshape(form),
        diagonal.reshape(form[1:]),
        np.empty(LANES, number),
        np.empty(LANES, number),
    )
    flat = closed_up, closed_down, gain
    steps, decrease, num_values = 0, 0.0, 0
    while True:
        done, by, missing = _update_pairs(board, variables, flat, store.rows, tolerance, max_steps - steps)
        steps += done
        decrease += by
        if missing < 0:
            return steps, decrease, num_values
        num_values += fetch(source, store, missing)


@borrowing
def _update_pairs(
    board: Board,
    variables: Variables,
    flat: tuple[NDArray[Any], NDArray[Any], NDArray[Any]],
    rows: NDArray[Any],
    tolerance: float,
    max_steps: int,
) -> tuple[int, float, int]:
    """Run to the end, or until a kernel row is missing.

    Args:
        board: What the passes read and write, in lanes.
        variables: The same memory without lanes, and the rest.
        flat: `closed_up`, `closed_down` and `gains` without lanes.
        rows: Kernel rows without lanes.
        tolerance: As in `solve`.
        max_steps: Pair updates.

    Returns:
        Pair updates, by how much they lowered the objective, and the sample whose row is missing or -1. An update needs
        two rows, and both are looked for again, so there must be room for two that are fetched one after the other.
    """
    F, beta, lower, upper, diagonal = variables
    by_lane, least, most, slot_of = board.F, board.least, board.most, board.slot_of
    closed_up, closed_down, gain = flat
    P = len(diagonal)
    number = F.dtype
    zero, far = number.type(0), number.type(FAR)
    i, j, delta, steps, decrease = 0, 0, 0.0, 0, 0.0
    Ki = Kj = board.rows[0]
    while True:
        for lane in range(LANES):
            least[lane] = far
            most[lane] = -far
        for s in range(len(by_lane)):
            if delta == 0.0:  # before the first update: the rows may not have been written
                extremes(by_lane[s], board.closed_up[s], board.closed_down[s], least, most)
            else:
                follow(
                    by_lane[s],
                    board.closed_up[s],
                    board.closed_down[s],
                    Ki,
                    Kj,
                    number.type(delta),
                    least,
                    most,
                )
        m, M = least_of(least), largest_of(most)
        if M - m < tolerance or steps >= max_steps:
            return steps, decrease, -1
        i = 0
        while least[i] != m:
            i += 1
        while F[i] + closed_up[i] != m:
            i += LANES
        slot = slot_of[i % P]
        if slot < 0:
            return steps, decrease, i % P
        Ki, di = board.rows[slot], diagonal[i % P]
        for lane in range(LANES):
            most[lane] = zero
        for s in range(len(by_lane)):
            gains(by_lane[s], board.closed_down[s], Ki, board.diagonal, m, di, board.gains[s], most)
        best = largest_of(most)
        if best <= 0.0:
            return steps, decrease, -1
        j = 0
        while most[j] != best:
            j += 1
        while gain[j] != best:
            j += LANES
        other = slot_of[j % P]
        if other < 0:
            return steps, decrease, j % P
        Kj = board.rows[other]
        curvature = max(_f64(di) + diagonal[j % P] - 2.0 * rows[slot, j % P], LEAST_CURVATURE)
        slope = _f64(F[j]) - m
        room_i, room_j = upper[i] - beta[i], beta[j] - lower[j]
        delta = min(slope / curvature, room_i, room_j)
        # Exactly at the bound, or rounding would leave a variable an unusable sliver away from it.
        old_i, old_j = beta[i], beta[j]
        beta[i] = upper[i] if delta == room_i else beta[i] + delta
        beta[j] = lower[j] if delta == room_j else beta[j] - delta
        if beta[i] == old_i and beta[j] == old_j:
            return steps, decrease, -1
        decrease += delta * (slope - 0.5 * delta * curvature)
        closed_up[i] = zero if beta[i] < upper[i] else far
        closed_down[i] = zero if beta[i] > lower[i] else -far
        closed_up[j] = zero if beta[j] < upper[j] else far
        closed_down[j] = zero if beta[j] > lower[j] else -far
        steps += 1
