"""Small problems dealt out over the ranks, and their solutions back to every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.svm.direct import LARGEST, DirectSolver, Small
from paceline.svm.exchange import fits, from_everyone
from paceline.svm.kernels import Kernel
from paceline.svm.problem import Counters, Problem, Solution, SolverSettings
from paceline.svm.samples import GramSamples, Samples
from paceline.svm.world import World

_DOING = "solving small problems"


def in_order(samples: Samples, ids: NDArray[np.int64]) -> Samples:
    """Those samples out of all, in that order; of a Gram matrix the columns too, renumbered from 0."""
    chosen = samples.take(np.argsort(samples.ids)[np.searchsorted(np.sort(samples.ids), ids)])
    if isinstance(chosen, GramSamples):
        return GramSamples(np.arange(len(ids)), chosen.rows[:, ids])
    return chosen


def solve_whole(problem: Problem, settings: SolverSettings, world: World) -> Solution:
    """Solve a problem of at most `LARGEST` variables on rank 0. Collective; every rank gets its part of `beta`."""
    everyone = from_everyone(world, problem.samples, _DOING)
    parts = np.stack([problem.linear, problem.lower, problem.upper, problem.start]).transpose(2, 0, 1)
    columns = np.concatenate(world.gather_uneven(parts.ravel(), _DOING)).reshape(-1, *parts.shape[1:])
    order = np.argsort(everyone.ids)
    linear, lower, upper, start = np.ascontiguousarray(columns[order].transpose(1, 2, 0))
    num = len(order)
    small = Small((0, num, num, num), linear, lower, upper, start)
    found = deal(problem.kernel, in_order(everyone, np.arange(num)), [small], settings, world)[0]
    return dataclasses.replace(found, beta=found.beta[problem.samples.ids])


def deal(
    kernel: Kernel,
    samples: Samples,
    problems: Sequence[Small],
    settings: SolverSettings,
    world: World,
    width: int = 0,
) -> list[Solution]:
    """Solve problems, each on one rank. Collective; every rank gets all solutions, `beta` of all samples of a problem.

    Args:
        kernel: Between samples.
        samples: Of all problems, the same on every rank.
        problems: The same on every rank.
        settings: The same on every rank.
        world: The ranks.
        width: Samples of the largest range that several problems share; 0 if none.
    """
    load = np.zeros(world.num_ranks)
    mine = []
    for at in sorted(range(len(problems)), key=lambda k: (-problems[k].linear.size, k)):
        rank = int(load.argmin())
        load[rank] += problems[at].linear.size
        if rank == world.rank:
            mine.append(at)
    found: dict[int, Solution] = {}
    if mine:
        solver = DirectSolver(kernel, samples, settings, width)
        found = {at: solver.solve(problems[at]) for at in sorted(mine)}
    if world.num_ranks > 1:
        words = [_packed(at, solution) for at, solution in found.items()]
        for packed in world.gather_uneven(np.concatenate([np.zeros(0), *words]), _DOING):
            found.update(_unpacked(packed))
    counts = {"num_collectives": world.num_collectives, "num_bytes": world.num_bytes}
    return [
        dataclasses.replace(found[at], counters=dataclasses.replace(found[at].counters, **counts))
        for at in range(len(problems))
    ]


def _packed(at: int, solution: Solution) -> NDArray[np.float64]:
    head = [at, len(solution.beta), solution.offset, solution.objective, solution.gap, solution.converged]
    counters = dataclasses.astuple(solution.counters)
    return np.concatenate([np.array([*head, *counters], np.float64), solution.beta])


def _unpacked(packed: NDArray[np.float64]) -> dict[int, Solution]:
    found, first = {}, 0
    names = [field.name for field in dataclasses.fields(Counters)]
    while first < len(packed):
        at, num, offset, objective, gap, converged = packed[first : first + 6]
        after = first + 6 + len(names)
        values: dict[str, Any] = {
            name: int(value) for name, value in zip(names, packed[first + 6 : after], strict=True)
        }
        first = after + int(num)
        beta = packed[after:first]
        found[int(at)] = Solution(
            beta, float(offset), float(objective), float(gap), bool(converged), Counters(**values)
        )
    return found


__all__ = ["LARGEST", "deal", "fits", "in_order", "solve_whole"]
