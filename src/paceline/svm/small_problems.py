"""Small problems over the same samples, and the loop that solves one after another: compiled.

Pairs of classes may be hundreds, each of which takes less time than a few lines of Python; so a whole list of them is
solved in one call.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.svm.compiled import FAR, LANES, compiled, inlined
from paceline.svm.kernel_row import GRAM, Source
from paceline.svm.row_store import RowStore, fill_from_gram, gradients_from_rows
from paceline.svm.smo import Variables, solve

STEPS_A_TURN = 200_000
# Columns of `outcomes`: extremes of the gradients (`FAR` if there are none), sum and number of those between their
# bounds, and what it took.
LEAST, MOST, FREE_SUM, NUM_FREE, OBJECTIVE, TURNS, STEPS, VALUES, FIELDS = 0, 1, 2, 3, 4, 5, 6, 7, 8


class SmallProblems(NamedTuple):
    """M problems with S variables a sample.

    Attributes:
        bounds: (a, b, c, d) of each: its samples are a to b and c to d (exclusive) of all; c = d if there is one
            range. Shape (M, 4).
        first: Where its samples begin in what follows, and the end of the last; shape (M + 1,).
        linear: p of `problem.py`, one problem after another, shape (S, first[M]).
        lower: Likewise.
        upper: Likewise.
        beta: A feasible b; solving changes it.
    """

    bounds: NDArray[np.int64]
    first: NDArray[np.int64]
    linear: NDArray[np.float64]
    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    beta: NDArray[np.float64]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Samples of each."""
        return np.diff(self.first)


class Shared(NamedTuple):
    """Kernel rows of samples with their own range, kept for other problems; see `RowStore`."""

    rows: NDArray[np.float64]
    slot: NDArray[np.int64]
    num: NDArray[np.int64]


class Limits(NamedTuple):
    """When to stop, and how many bytes kernel rows may take."""

    tol: float
    max_steps: int
    cache_bytes: float


@compiled
def num_rows(num: int, cache_bytes: float) -> int:
    """Kernel rows of a problem of `num` samples that there is room for."""
    width = -(-num // LANES) * LANES
    return max(3, min(num, int(cache_bytes // (8 * width))))


@compiled
def solve_some(
    source: Source,
    diagonal: NDArray[np.float64],
    problems: SmallProblems,
    which: NDArray[np.int64],
    limits: Limits,
    memory: NDArray[np.float64],
    shared: Shared,
    outcomes: NDArray[np.float64],
) -> int:
    """Solve problems until all are solved, or `STEPS_A_TURN` pair updates were made: call again to go on.

    Args:
        source: Samples of all problems, and the kernel.
        diagonal: Their kernel values with themselves.
        problems: Their `beta` is changed.
        which: Numbers of the problems to solve.
        limits: For each.
        memory: Room for kernel rows.
        shared: Changed.
        outcomes: What is known of each problem, shape (M, FIELDS); changed.

    Returns:
        How many of `which` are done.
    """
    steps = 0.0
    for k in range(len(which)):
        before = outcomes[which[k], STEPS]
        is_done = _turn(source, diagonal, problems, which[k], limits, memory, shared, outcomes)
        steps += outcomes[which[k], STEPS] - before
        if not is_done:
            return k
        if steps >= STEPS_A_TURN:  # so that an interrupt is heard
            return k + 1
    return len(which)


@inlined
def _turn(
    source: Source,
    diagonal: NDArray[np.float64],
    problems: SmallProblems,
    number: int,
    limits: Limits,
    memory: NDArray[np.float64],
    shared: Shared,
    outcomes: NDArray[np.float64],
) -> bool:
    """Go on with one problem; returns whether it is done."""
    a, b, c, d = problems.bounds[number]
    first = problems.first[number]
    S, n = len(problems.linear), problems.first[number + 1] - first
    P = -(-n // LANES) * LANES
    linear, lower, upper, beta = np.zeros((S, P)), np.zeros((S, P)), np.zeros((S, P)), np.zeros((S, P))
    for s in range(S):
        for t in range(n):
            linear[s, t] = problems.linear[s, first + t]
            lower[s, t], upper[s, t] = problems.lower[s, first + t], problems.upper[s, first + t]
            beta[s, t] = problems.beta[s, first + t]
    d_own = np.zeros(P)
    for t in range(n):
        d_own[t] = diagonal[a + t if t < b - a else c + t - (b - a)]
    num = num_rows(n, limits.cache_bytes)
    rows = memory[: num * P].reshape((num, P))
    unknown, free = np.full(n, -1), np.full(num, -1)
    store = RowStore(
        (a, b, c, d), rows, free, unknown, np.zeros(1, np.int64), shared.rows, shared.slot, shared.num
    )
    if source.form == GRAM and num >= n:
        fill_from_gram(source.rows, store)
    out = outcomes[number]
    F = np.empty((S, P))
    _look(source, store, linear, lower, upper, beta, F, out)
    steps = 0
    if out[MOST] - out[LEAST] > limits.tol and out[STEPS] < limits.max_steps:
        variables = Variables(F.ravel(), beta.ravel(), lower.ravel(), upper.ravel(), d_own)
        most = min(limits.max_steps - int(out[STEPS]), STEPS_A_TURN)
        steps, _, num_values = solve(source, store, variables, limits.tol, most)
        out[TURNS] += 1
        out[STEPS] += steps
        out[VALUES] += num_values
        # From scratch, because rounding adds up over many updates.
        _look(source, store, linear, lower, upper, beta, F, out)
    for s in range(S):
        for t in range(n):
            problems.beta[s, first + t] = beta[s, t]
    # Without a step no pair can be improved in double precision.
    return out[MOST] - out[LEAST] <= limits.tol or out[STEPS] >= limits.max_steps or steps == 0


@inlined
def _look(
    source: Source,
    store: RowStore,
    linear: NDArray[np.float64],
    lower: NDArray[np.float64],
    upper: NDArray[np.float64],
    beta: NDArray[np.float64],
    F: NDArray[np.float64],
    out: NDArray[np.float64],
) -> None:
    """Compute the gradients from all coefficients; write them to `F`, and what follows from them to `out`."""
    S, P = linear.shape
    weights, g = np.zeros(P), np.empty(P)
    for s in range(S):
        for t in range(P):
            weights[t] += beta[s, t]
    out[VALUES] += gradients_from_rows(source, store, weights, g)
    least, most, total, num_free, objective = FAR, -FAR, 0.0, 0, 0.0
    for s in range(S):
        for t in range(P):
            f = g[t] + linear[s, t]
            F[s, t] = f
            objective += 0.5 * beta[s, t] * (f + linear[s, t])
            may_grow, may_shrink = beta[s, t] < upper[s, t], beta[s, t] > lower[s, t]
            if may_grow:
                least = min(least, f)
            if may_shrink:
                most = max(most, f)
            if may_grow and may_shrink:
                total += f
                num_free += 1
    out[LEAST], out[MOST], out[FREE_SUM], out[NUM_FREE], out[OBJECTIVE] = (
        least,
        most,
        total,
        num_free,
        objective,
    )
