"""Small problems over the same samples, each solved as a whole by one thread in a compiled loop, without working sets.

A problem is small if its gradient stays in the processor's cache. Then pair updates are so cheap that neither working
sets nor other ranks pay. Pairs of classes may be hundreds, each of which takes less time than a few lines of Python. So
a whole list of them is solved in one compiled call.

Rules
1. Everything is in double precision, so what is found is exact; the gradient is nevertheless summed anew at the end.
2. The samples are sorted by class, so a pair of classes is two ranges. The part of a kernel row that belongs to the
   sample's own class is computed once for all pairs.
3. Where several problems share few samples, all kernel values come first, by one matrix product.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline_svm.compiled import FAR, LANES, compiled, inner
from paceline_svm.kernel_rows import (
    Room,
    RowStore,
    Shared,
    Source,
    fill_from_gram,
    gradients_from_rows,
    room_for,
    source_of,
)
from paceline_svm.kernels import Kernel
from paceline_svm.problem import Progress, SolverSettings
from paceline_svm.sample_forms import DenseSamples, GramSamples, Samples
from paceline_svm.smo import LaneMemory, Variables, lane_memory, lanes_of, solve_inside

STEPS_A_CALL = 200_000  # pair updates, after which compiled code returns
# Columns of `outcomes`: extremes of the gradients (`FAR` if there are none), sum and number of those of variables
# between their bounds, objective, and what it took.
LEAST, MOST, FREE_SUM, NUM_FREE, OBJECTIVE, WORKING_SETS, STEPS, VALUES, FIELDS = 0, 1, 2, 3, 4, 5, 6, 7, 8
_FEW = 2_000  # samples, all of whose kernel values are computed at once if there are several problems
_SHARED_RATIO = 0.5  # of the cache, if there is something to share


class SmallProblems(NamedTuple):
    """M problems with S variables a sample.

    Attributes:
        bounds: (a, b, c, d) of each, shape (M, 4): its samples are a to b and c to d (exclusive) of all. If there
            is one range, c = d.
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
        """Return the number of samples of each problem."""
        return np.diff(self.first)


class Memory(NamedTuple):
    """The memory that a solver writes to; P is the number of samples padded to LANES, S that of variables per sample.

    Attributes:
        rows: For kernel rows.
        slot_of: See `RowStore`; shape (at least P,).
        owner: See `RowStore`.
        next_slot: See `RowStore`; shape (1,).
        by_variable: Linear parts, lower and upper bounds, coefficients, gradients; shape (5, at least S * P).
        by_sample: Diagonal, weights, gradients, a spare row; shape (4, at least P).
        lanes: For at least S * P variables.
        room: For rows of at least P.
    """

    rows: NDArray[np.float64]
    slot_of: NDArray[np.int64]
    owner: NDArray[np.int64]
    next_slot: NDArray[np.int64]
    by_variable: NDArray[np.float64]
    by_sample: NDArray[np.float64]
    lanes: LaneMemory
    room: Room

    @classmethod
    def of(cls, num_values: int, num_sides: int, width: int, source: Source) -> Memory:
        """Memory for kernel rows of so many numbers, and problems of up to `width` samples, padding included."""
        return cls(
            np.empty(num_values),
            np.empty(width, np.int64),
            np.empty(width, np.int64),
            np.zeros(1, np.int64),
            np.empty((5, num_sides * width)),
            np.empty((4, width)),
            lane_memory(num_sides * width, np.float64),
            room_for(source, width, np.float64),
        )


class Limits(NamedTuple):
    """The limits of a solver, and the number of kernel values of a problem that there is room for."""

    tol: float
    max_steps: int
    num_values: int


def with_all_values(kernel: Kernel, samples: Samples, problems: SmallProblems, cache_bytes: float) -> Samples:
    """Return the samples as their Gram matrix if that is less work than single kernel rows, otherwise as they are."""
    num = len(samples)
    if not isinstance(samples, DenseSamples) or len(problems.bounds) == 1:
        return samples
    if num > _FEW or 8 * num**2 > _SHARED_RATIO * cache_bytes:
        return samples
    rows = samples.astype(np.float64)
    return GramSamples(samples.ids, kernel.values(rows, rows))


class DirectSolver:
    """Solves small problems, one after another.

    Args:
        kernel: Between samples.
        samples: Of all problems, on this rank.
        problems: Their coefficients are changed.
        settings: `cache_bytes` bounds the kernel rows.
        outcomes: Of the problems, shape (M, FIELDS); changed.
    """

    def __init__(
        self,
        kernel: Kernel,
        samples: Samples,
        problems: SmallProblems,
        settings: SolverSettings,
        outcomes: NDArray[np.float64],
    ) -> None:
        self._problems, self._settings, self._outcomes = problems, settings, outcomes
        self._source = source_of(kernel, samples)
        num, cache_bytes = len(samples), settings.cache_bytes
        self._diagonal = kernel.diagonal(samples)
        sizes = np.unique(problems.sizes)
        rooms = [num_rows(int(size), cache_bytes) * (-(-int(size) // LANES) * LANES) for size in sizes]
        widest = -(-int(sizes.max()) // LANES) * LANES
        self._memory = Memory.of(max(rooms), len(problems.linear), widest, self._source)
        ranges = problems.bounds[:, 1::2] - problems.bounds[:, ::2]
        has_pairs = bool(ranges[:, 1].any()) and len(ranges) > 1
        width = int(ranges.max()) if has_pairs and not isinstance(samples, GramSamples) else 0
        num_shared = min(num, int(cache_bytes * _SHARED_RATIO / (8 * width))) if width else 0
        unknown = np.full(num, -1, np.int64)
        # Empty rather than None: one range of samples is compiled as two are.
        self._shared = Shared(np.empty((num_shared, width)), unknown, np.zeros(1, np.int64))

    def solve(self, which: NDArray[np.int64]) -> None:
        """Solve some; reports progress after every 200,000 pair updates, and at the end of each problem."""
        started_s = time.monotonic()
        settings, size = self._settings, 1 if self._settings.report else len(which)
        limits = Limits(
            settings.tol,
            settings.step_limit(self._problems.linear.size),
            int(settings.cache_bytes // 8),
        )
        while len(which):
            done = solve_some(
                self._source,
                self._diagonal,
                self._problems,
                which[:size],
                limits,
                self._memory,
                self._shared,
                self._outcomes,
            )
            self._report(int(which[0]), time.monotonic() - started_s)
            which = which[done:]

    def _report(self, number: int, elapsed_s: float) -> None:
        if self._settings.report is not None:
            first, last = self._problems.first[number : number + 2]
            num_support = int(np.count_nonzero(self._problems.beta[:, first:last].any(axis=0)))
            out = self._outcomes[number]
            gap = max(float(out[MOST] - out[LEAST]), 0.0)
            self._settings.report(
                Progress(
                    int(out[WORKING_SETS]), int(out[STEPS]), gap, int(last - first), num_support, elapsed_s
                )
            )


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
    memory: Memory,
    shared: Shared,
    outcomes: NDArray[np.float64],
) -> int:
    """Solve problems until all are solved, or `STEPS_A_CALL` pair updates were made: call again to go on.

    Args:
        source: Samples of all problems, and the kernel.
        diagonal: Their kernel values with themselves.
        problems: Their `beta` is changed.
        which: Numbers of the problems to solve.
        limits: For each.
        memory: Written over.
        shared: Changed.
        outcomes: What is known of each problem, shape (M, FIELDS); changed.

    Returns:
        How many of `which` are done.
    """
    steps = 0.0
    for k in range(len(which)):
        before = outcomes[which[k], STEPS]
        is_done = _go_on(source, diagonal, problems, which[k], limits, memory, shared, outcomes)
        steps += outcomes[which[k], STEPS] - before
        if not is_done:
            return k
        if steps >= STEPS_A_CALL:  # so that an interrupt is heard
            return k + 1
    return len(which)


@inner
def _go_on(
    source: Source,
    diagonal: NDArray[np.float64],
    problems: SmallProblems,
    number: int,
    limits: Limits,
    memory: Memory,
    shared: Shared,
    outcomes: NDArray[np.float64],
) -> bool:
    """Go on with one problem; returns whether it is done."""
    first = problems.first[number]
    S, n = len(problems.linear), problems.first[number + 1] - first
    P = -(-n // LANES) * LANES
    total, per_sample = S * P, memory.by_sample
    linear, variables = _loaded(problems, number, diagonal, memory)
    store = _empty_store(problems, number, limits.num_values // P, memory, shared)
    if len(store.rows) >= n:
        fill_from_gram(source.gram, store)
    out = outcomes[number]
    _evaluate(source, store, linear, variables, per_sample, out)
    steps = 0
    if out[MOST] - out[LEAST] > limits.tol and out[STEPS] < limits.max_steps:
        closed = memory.lanes
        part = LaneMemory(
            closed.closed_up[:total],
            closed.closed_down[:total],
            closed.gains[:total],
            closed.least,
            closed.most,
        )
        most = limits.max_steps - int(out[STEPS])
        if most > STEPS_A_CALL:
            most = STEPS_A_CALL
        lanes = lanes_of(store, variables, part)
        steps, _, num_values = solve_inside(source, store, variables, lanes, part, limits.tol, most)
        out[WORKING_SETS] += 1
        out[STEPS] += steps
        out[VALUES] += num_values
        # From scratch, because rounding adds up over many updates.
        _evaluate(source, store, linear, variables, per_sample, out)
    for s in range(S):
        for t in range(n):
            problems.beta[s, first + t] = variables.beta[s * P + t]
    # Without a step no pair can be improved in double precision.
    return out[MOST] - out[LEAST] <= limits.tol or out[STEPS] >= limits.max_steps or steps == 0


@inner
def _loaded(
    problems: SmallProblems, number: int, diagonal: NDArray[np.float64], memory: Memory
) -> tuple[NDArray[np.float64], Variables]:
    """Return the linear part and the variables of a problem, padded and in memory, without computed gradients."""
    bounds, first = problems.bounds[number], problems.first[number]
    a, b, c = bounds[0], bounds[1], bounds[2]
    S, n = len(problems.linear), problems.first[number + 1] - first
    P = -(-n // LANES) * LANES
    own, total = memory.by_variable, S * P
    linear, lower, upper = own[0, :total], own[1, :total], own[2, :total]
    beta, F, d_own = own[3, :total], own[4, :total], memory.by_sample[0, :P]
    for s in range(S):
        for t in range(P):
            v, is_there = s * P + t, t < n
            linear[v] = problems.linear[s, first + t] if is_there else 0.0
            lower[v] = problems.lower[s, first + t] if is_there else 0.0
            upper[v] = problems.upper[s, first + t] if is_there else 0.0
            beta[v] = problems.beta[s, first + t] if is_there else 0.0
    for t in range(P):
        d_own[t] = 0.0
        if t < n:
            d_own[t] = diagonal[a + t if t < b - a else c + t - (b - a)]
    return linear, Variables(F, beta, lower, upper, d_own)


@inner
def _empty_store(
    problems: SmallProblems, number: int, num_rows: int, memory: Memory, shared: Shared
) -> RowStore:
    """Room for kernel rows of a problem: for so many of them, three at least, and no more than samples."""
    bounds, n = problems.bounds[number], problems.first[number + 1] - problems.first[number]
    P = -(-n // LANES) * LANES
    num = num_rows
    if num > n:
        num = n
    if num < 3:
        num = 3
    unknown, free = memory.slot_of[:n], memory.owner[:num]
    for t in range(n):
        unknown[t] = -1
    for t in range(num):
        free[t] = -1
    memory.next_slot[0] = 0
    return RowStore(
        (bounds[0], bounds[1], bounds[2], bounds[3]),
        memory.rows[: num * P].reshape((num, P)),
        free,
        unknown,
        memory.next_slot,
        shared,
        memory.room,
    )


@inner
def _evaluate(
    source: Source,
    store: RowStore,
    linear: NDArray[np.float64],
    variables: Variables,
    per_sample: NDArray[np.float64],
    out: NDArray[np.float64],
) -> None:
    """Compute the gradients from all coefficients; write them to `F`, and what follows from them to `out`."""
    F, beta, lower, upper, d_own = variables
    P = len(d_own)
    weights, g, spare = per_sample[1, :P], per_sample[2, :P], per_sample[3, :P]
    for t in range(P):
        weights[t] = 0.0
        for v in range(t, len(F), P):
            weights[t] += beta[v]
    out[VALUES] += gradients_from_rows(source, store, weights, spare, g)
    least, most, total, num_free, objective = FAR, -FAR, 0.0, 0, 0.0
    for v in range(len(F)):
        f = g[v % P] + linear[v]
        F[v] = f
        objective += 0.5 * beta[v] * (f + linear[v])
        may_grow, may_shrink = beta[v] < upper[v], beta[v] > lower[v]
        if may_grow:
            if f < least:
                least = f
        if may_shrink:
            if f > most:
                most = f
        if may_grow and may_shrink:
            total += f
            num_free += 1
    out[LEAST], out[MOST], out[FREE_SUM] = least, most, total
    out[NUM_FREE], out[OBJECTIVE] = num_free, objective
