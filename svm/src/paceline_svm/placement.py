"""The choice of the ranks that solve a problem: one or all together, by what is faster; small ones are spread.

All ranks share the work on kernel rows. Every rank repeats the work on working sets, and each working set takes an
all-gather. Where rows are short there is nothing to share. Then the problem goes to rank 0, which uses the threads of
all ranks of its host, as they have nothing else to do. Where every rank has all rows and rounds alike, each solves it
for itself, and nothing is exchanged. Which way is taken does not change what the optimum is.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from paceline_svm.communicator import Alone, Communicator
from paceline_svm.compiled import FAR
from paceline_svm.kernels import Kernel
from paceline_svm.problem import Counters, Problem, Solution, SolverSettings
from paceline_svm.sample_forms import (
    GramSamples,
    Samples,
    SparseSamples,
    fits_on_every_rank,
    gather_samples,
    renumbered,
)
from paceline_svm.small_problems import (
    FIELDS,
    FREE_SUM,
    LEAST,
    MOST,
    NUM_FREE,
    OBJECTIVE,
    STEPS,
    VALUES,
    WORKING_SETS,
    DirectSolver,
    SmallProblems,
    with_all_values,
)
from paceline_svm.solver import Solver
from paceline_svm.thread_pool import for_each, num_threads, thread_pool

LARGEST = 3_000  # variables of a small problem
_ON_ONE, _SMALL = "solving on one rank", "solving small problems"  # what a rank that loses a peer was doing
_PIECES = 4  # pieces of work for each thread
_VALUE_S, _FEATURE_S = 0.6e-9, 0.02e-9  # of a kernel value, and of each of its features
_LEAST_ROW_S = 10e-6  # a kernel row of all samples, from which sharing pays (measured: lab/LOG.md)


def solve(problem: Problem, settings: SolverSettings, communicator: Communicator) -> Solution:
    """Solve one problem of all ranks. Collective; every rank gets its part of `beta`."""
    num, num_numbers = problem.num_samples, problem.extent.num_numbers
    fits = fits_on_every_rank(num_numbers, settings.cache_bytes)
    if fits and num * len(problem.linear) <= LARGEST:
        return _solve_on_one(problem, settings, communicator, is_small=True)
    is_sparse = isinstance(problem.samples, SparseSamples)
    if communicator.num_ranks == 1 or not fits or row_s(num, num_numbers, is_sparse) >= _LEAST_ROW_S:
        return Solver(problem, settings, communicator).solve()
    return _solve_on_one(problem, settings, communicator, is_small=False)


def row_s(num_samples: int, num_numbers: float, is_sparse: bool) -> float:
    """Estimate the time of a kernel row of all samples, roughly.

    Args:
        num_samples: All.
        num_numbers: Their features; of sparse rows, what is stored.
        is_sparse: A sparse product has no matrix product's speed.
    """
    return num_samples * _VALUE_S + num_numbers * (6.0 if is_sparse else 1.0) * _FEATURE_S


def is_for_one(X: Any) -> bool:
    """Return whether a problem of all these rows, dense or CSR, is solved by one rank."""
    return row_s(X.shape[0], X.size, sp.issparse(X)) < _LEAST_ROW_S


def _solve_on_one(
    problem: Problem, settings: SolverSettings, communicator: Communicator, is_small: bool
) -> Solution:
    """Gather a problem on every rank and solve it on one. Collective."""
    whole = whole_problem(problem, communicator)
    if is_small:
        num = problem.num_samples
        bounds, first = np.array([[0, num, num, num]]), np.array([0, num])
        small = SmallProblems(bounds, first, whole.linear, whole.lower, whole.upper, whole.start)
        found = solve_small(whole.kernel, whole.samples, small, settings, communicator)[0]
    else:
        mine = np.zeros(0)
        if communicator.rank == 0:
            with thread_pool(communicator.num_threads):
                mine = _packed(Solver(whole, settings, Alone()).solve())
        found = _unpacked(communicator.gather_uneven(mine, _ON_ONE)[0])
        counts = {"num_collectives": communicator.num_collectives, "num_bytes": communicator.num_bytes}
        found = found._replace(counters=found.counters._replace(**counts))
    return found._replace(beta=found.beta[problem.samples.ids])


def whole_problem(problem: Problem, communicator: Communicator) -> Problem:
    """Return the problem of all ranks, samples in the order of their numbers. Collective."""
    everyone = gather_samples(communicator, problem.samples, _ON_ONE, problem.extent.most_numbers)
    ids = np.arange(problem.num_samples)
    return dataclasses.replace(problem, samples=renumbered(in_order(everyone, ids), ids))


def _packed(solution: Solution) -> NDArray[np.float64]:
    """Pack a solution into one array to send."""
    linear_part = np.nan if solution.linear_part is None else solution.linear_part
    head = [solution.offset, solution.objective, solution.gap, solution.converged, linear_part]
    return np.concatenate([np.array([*head, *solution.counters], np.float64), solution.beta])


def _unpacked(numbers: NDArray[np.float64]) -> Solution:
    """Unpack the solution of which `_packed` made an array."""
    head, counters, beta = np.split(numbers, [5, 5 + len(Counters._fields)])
    offset, objective, gap, converged, linear_part = head.tolist()
    return Solution(
        beta,
        offset,
        objective,
        gap,
        bool(converged),
        Counters(*map(int, counters)),
        None if np.isnan(linear_part) else linear_part,
    )


def in_order(samples: Samples, ids: NDArray[np.int64]) -> Samples:
    """Return those samples out of all, in that order; of a Gram matrix the columns too, renumbered from 0."""
    chosen = samples.take(np.argsort(samples.ids)[np.searchsorted(np.sort(samples.ids), ids)])
    if isinstance(chosen, GramSamples):
        return GramSamples(np.arange(len(ids)), chosen.rows[:, ids])
    return chosen


def solve_small(
    kernel: Kernel,
    samples: Samples,
    problems: SmallProblems,
    settings: SolverSettings,
    communicator: Communicator,
) -> list[Solution]:
    """Solve problems, each on one rank. Collective; every rank gets all solutions, `beta` of all samples of a problem.

    Args:
        kernel: Between samples.
        samples: Of all problems, the same on every rank.
        problems: The same on every rank; their coefficients are changed.
        settings: The same on every rank.
        communicator: The ranks.
    """
    outcomes = np.zeros((len(problems.bounds), FIELDS))
    assigned = _assignment(problems, communicator.num_ranks)
    mine = assigned[communicator.rank]
    if len(mine):
        _solve_mine(kernel, samples, problems, settings, mine, outcomes)
    if communicator.num_ranks > 1:
        numbers = np.concatenate([outcomes[mine].ravel(), problems.beta[:, _columns(problems, mine)].ravel()])
        for which, found in zip(assigned, communicator.gather_uneven(numbers, _SMALL), strict=True):
            columns, num = _columns(problems, which), outcomes[which].size
            outcomes[which] = found[:num].reshape(-1, FIELDS)
            problems.beta[:, columns] = found[num:].reshape(len(problems.beta), len(columns))
    return _solutions(problems, outcomes, settings.tol, communicator)


def _assignment(problems: SmallProblems, num_ranks: int) -> list[NDArray[np.int64]]:
    """Return the problems of each rank, ascending; assigned largest first, to the rank with the least to do."""
    if num_ranks == 1:
        return [np.arange(len(problems.bounds))]
    load = np.zeros(num_ranks)
    rank_of = np.empty(len(problems.bounds), np.int64)
    for at in np.argsort(-problems.sizes, kind="stable"):
        rank_of[at] = load.argmin()
        load[rank_of[at]] += problems.sizes[at]
    return [np.flatnonzero(rank_of == rank) for rank in range(num_ranks)]


def _columns(problems: SmallProblems, which: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return positions of the coefficients of some problems in `beta`."""
    is_there = np.zeros(len(problems.bounds), np.bool_)
    is_there[which] = True
    return np.flatnonzero(np.repeat(is_there, problems.sizes))


def _solve_mine(
    kernel: Kernel,
    samples: Samples,
    problems: SmallProblems,
    settings: SolverSettings,
    which: NDArray[np.int64],
    outcomes: NDArray[np.float64],
) -> None:
    """Solve some problems on this rank's threads, each of which has its part of the cache."""
    samples = with_all_values(kernel, samples, problems, settings.cache_bytes)
    num = min(num_threads(), len(which))
    part = dataclasses.replace(settings, cache_bytes=settings.cache_bytes / num)
    mine = threading.local()

    def one(piece: NDArray[np.int64]) -> None:
        if not hasattr(mine, "solver"):
            mine.solver = DirectSolver(kernel, samples, problems, part, outcomes)
        mine.solver.solve(piece)

    for_each(one, np.array_split(which, min(_PIECES * num, len(which)) if num > 1 else 1))


def _solutions(
    problems: SmallProblems, outcomes: NDArray[np.float64], tol: float, communicator: Communicator
) -> list[Solution]:
    """Interpret the outcomes: offsets from the variables between their bounds, or the middle of the extremes."""
    extremes = outcomes[:, [LEAST, MOST]]
    least, most = np.where(np.abs(extremes) == FAR, np.copysign(np.inf, extremes), extremes).T
    gaps = np.maximum(most - least, 0.0)
    offsets = np.where(
        outcomes[:, NUM_FREE] > 0,
        outcomes[:, FREE_SUM] / np.maximum(outcomes[:, NUM_FREE], 1),
        (least + most) / 2,
    )
    beta, first = problems.beta.sum(axis=0), problems.first.tolist()
    whole = outcomes[:, [WORKING_SETS, STEPS, VALUES]].astype(np.int64).tolist()
    columns = zip(
        itertools.pairwise(first),
        offsets.tolist(),
        outcomes[:, OBJECTIVE].tolist(),
        gaps.tolist(),
        whole,
        strict=True,
    )
    traffic = communicator.num_collectives, communicator.num_bytes
    return [
        Solution(
            beta[begin:end],
            offset,
            objective,
            gap,
            gap <= tol,
            Counters(working_sets, steps, num_values, 0, end - begin, 0, *traffic),
        )
        for (begin, end), offset, objective, gap, (working_sets, steps, num_values) in columns
    ]
