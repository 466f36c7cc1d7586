"""The passes over all variables that a pair update takes: compiled, in lanes (`compiled.py`, rule 1)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.svm.compiled import LANES, borrowing

LEAST_CURVATURE = 1e-12


class Board(NamedTuple):
    """What the passes over all variables read and write, in lanes: S sides of L times LANES.

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


@borrowing
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


@borrowing
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


@borrowing
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


@borrowing
def least_of(lanes: NDArray[Any]) -> Any:
    """The smallest; four chains of comparisons, for each waits for the one before."""
    a, b, c, d = lanes[0], lanes[1], lanes[2], lanes[3]
    for k in range(4, LANES, 4):
        a, b, c, d = min(a, lanes[k]), min(b, lanes[k + 1]), min(c, lanes[k + 2]), min(d, lanes[k + 3])
    return min(a, b, c, d)


@borrowing
def largest_of(lanes: NDArray[Any]) -> Any:
    """The largest."""
    a, b, c, d = lanes[0], lanes[1], lanes[2], lanes[3]
    for k in range(4, LANES, 4):
        a, b, c, d = max(a, lanes[k]), max(b, lanes[k + 1]), max(c, lanes[k + 2]), max(d, lanes[k + 3])
    return max(a, b, c, d)
