"""Who solves a problem? One rank by itself, or all ranks together: whatever is expected to be faster.

All ranks share the work on kernel rows; every rank repeats that on working sets, and every turn is an exchange. Where
rows are short there is nothing to share: then the problem goes to rank 0, which uses the threads of all ranks of its
host, as they have nothing else to do. Where every rank has all rows and rounds alike, each solves it for itself, and
nothing is exchanged. Which way is taken does not change what the optimum is.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray

from paceline.svm.dealing import LARGEST, deal, in_order
from paceline.svm.exchange import fits, from_everyone
from paceline.svm.problem import Counters, Problem, Solution, SolverSettings
from paceline.svm.samples import SparseSamples, renumbered
from paceline.svm.small_problems import SmallProblems
from paceline.svm.solver import Solver
from paceline.svm.threads import crew
from paceline.svm.world import Alone, World

_DOING = "solving on one rank"
# Seconds: of a kernel value, and of each of its features.
_VALUE_S, _FEATURE_S = 0.6e-9, 0.02e-9
_LEAST_ROW_S = 10e-6  # a kernel row of all samples, from which sharing pays (measured: benchmarks/LOG.md)


def solve(problem: Problem, settings: SolverSettings, world: World) -> Solution:
    """Solve one problem of all ranks. Collective; every rank gets its part of `beta`."""
    is_small = problem.num_samples * len(problem.linear) <= LARGEST
    if is_small and fits(world, problem.samples, settings.cache_bytes):
        return _solve_on_one(problem, settings, world, is_small=True)
    if world.num_ranks == 1 or _row_s(problem, world) >= _LEAST_ROW_S:
        return Solver(problem, settings, world).solve()
    if not fits(world, problem.samples, settings.cache_bytes):
        return Solver(problem, settings, world).solve()
    return _solve_on_one(problem, settings, world, is_small=False)


def _row_s(problem: Problem, world: World) -> float:
    """How long a kernel row of all samples takes, roughly. Collective."""
    samples = problem.samples
    num = sum(array.size for array in samples.to_arrays())
    num_all = float(world.total(np.array([float(num)]), _DOING)[0])
    return row_s(problem.num_samples, num_all, isinstance(samples, SparseSamples))


def row_s(num_samples: int, num_numbers: float, is_sparse: bool) -> float:
    """How long a kernel row of all samples takes, roughly.

    Args:
        num_samples: All.
        num_numbers: Their features; of sparse rows, what is stored.
        is_sparse: A sparse product has no matrix product's speed.
    """
    return num_samples * _VALUE_S + num_numbers * (6.0 if is_sparse else 1.0) * _FEATURE_S


def is_for_one(X: Any) -> bool:
    """Whether a problem of all these rows, dense or CSR, is solved by one rank."""
    return row_s(X.shape[0], X.size, sp.issparse(X)) < _LEAST_ROW_S


def _solve_on_one(problem: Problem, settings: SolverSettings, world: World, is_small: bool) -> Solution:
    """Solve on rank 0."""
    whole = everyones(problem, world)
    if is_small:
        num = problem.num_samples
        bounds, first = np.array([[0, num, num, num]]), np.array([0, num])
        small = SmallProblems(bounds, first, whole.linear, whole.lower, whole.upper, whole.start)
        found = deal(whole.kernel, whole.samples, small, settings, world)[0]
    else:
        hosts = world.gather_objects([platform.node(), torch.get_num_threads()], _DOING)
        num_threads = sum(threads for host, threads in hosts if host == hosts[0][0])
        mine = np.zeros(0)
        if world.rank == 0:
            with crew(num_threads):
                mine = _packed(Solver(whole, settings, Alone()).solve())
        found = _unpacked(world.gather_uneven(mine, _DOING)[0])
        counts = {"num_collectives": world.num_collectives, "num_bytes": world.num_bytes}
        found = found._replace(counters=found.counters._replace(**counts))
    return found._replace(beta=found.beta[problem.samples.ids])


def everyones(problem: Problem, world: World) -> Problem:
    """The problem of all ranks, samples in the order of their numbers. Collective."""
    everyone = from_everyone(world, problem.samples, _DOING)
    parts = np.stack([problem.linear, problem.lower, problem.upper, problem.start]).transpose(2, 0, 1)
    columns = np.concatenate(world.gather_uneven(parts.ravel(), _DOING)).reshape(-1, *parts.shape[1:])
    order = np.argsort(everyone.ids)
    linear, lower, upper, start = np.ascontiguousarray(columns[order].transpose(1, 2, 0))
    samples = renumbered(in_order(everyone, np.arange(len(order))), np.arange(len(order)))
    return Problem(problem.kernel, samples, problem.num_samples, linear, lower, upper, start)


def _packed(solution: Solution) -> NDArray[np.float64]:
    """A solution as numbers to send."""
    head = [solution.offset, solution.objective, solution.gap, solution.converged]
    return np.concatenate([np.array([*head, *solution.counters], np.float64), solution.beta])


def _unpacked(numbers: NDArray[np.float64]) -> Solution:
    head, counters, beta = np.split(numbers, [4, 4 + len(Counters._fields)])
    offset, objective, gap, converged = head.tolist()
    return Solution(beta, offset, objective, gap, bool(converged), Counters(*map(int, counters)))
