"""Small problems dealt out over the ranks, and their solutions back to every rank."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.svm.direct import LARGEST, DirectSolver, Small
from paceline.svm.exchange import fits
from paceline.svm.kernels import Kernel
from paceline.svm.problem import Counters, Solution, SolverSettings
from paceline.svm.samples import GramSamples, Samples
from paceline.svm.threads import each, num_threads
from paceline.svm.world import World

_DOING = "solving small problems"


def in_order(samples: Samples, ids: NDArray[np.int64]) -> Samples:
    """Those samples out of all, in that order; of a Gram matrix the columns too, renumbered from 0."""
    chosen = samples.take(np.argsort(samples.ids)[np.searchsorted(np.sort(samples.ids), ids)])
    if isinstance(chosen, GramSamples):
        return GramSamples(np.arange(len(ids)), chosen.rows[:, ids])
    return chosen


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
        found = _solve(kernel, samples, {at: problems[at] for at in sorted(mine)}, settings, width)
    if world.num_ranks > 1:
        words = [packed(at, solution) for at, solution in found.items()]
        for numbers in world.gather_uneven(np.concatenate([np.zeros(0), *words]), _DOING):
            found.update(unpacked(numbers))
    counts = {"num_collectives": world.num_collectives, "num_bytes": world.num_bytes}
    return [
        dataclasses.replace(found[at], counters=dataclasses.replace(found[at].counters, **counts))
        for at in range(len(problems))
    ]


def _solve(
    kernel: Kernel,
    samples: Samples,
    problems: dict[int, Small],
    settings: SolverSettings,
    width: int,
) -> dict[int, Solution]:
    """Solve some on this rank's threads, each of which has its part of the cache."""
    found: dict[int, Solution] = {}
    part = dataclasses.replace(settings, cache_bytes=settings.cache_bytes / min(num_threads(), len(problems)))
    mine = threading.local()

    def one(at: int) -> None:
        if not hasattr(mine, "solver"):
            mine.solver = DirectSolver(kernel, samples, part, width)
        found[at] = mine.solver.solve(problems[at])

    each(one, list(problems))
    return found


def packed(at: int, solution: Solution) -> NDArray[np.float64]:
    """A numbered solution as numbers to send."""
    head = [at, len(solution.beta), solution.offset, solution.objective, solution.gap, solution.converged]
    counters = dataclasses.astuple(solution.counters)
    return np.concatenate([np.array([*head, *counters], np.float64), solution.beta])


def unpacked(numbers: NDArray[np.float64]) -> dict[int, Solution]:
    """Solutions by number."""
    found, first = {}, 0
    names = [field.name for field in dataclasses.fields(Counters)]
    while first < len(numbers):
        at, num, offset, objective, gap, converged = numbers[first : first + 6]
        after = first + 6 + len(names)
        values: dict[str, Any] = {
            name: int(value) for name, value in zip(names, numbers[first + 6 : after], strict=True)
        }
        first = after + int(num)
        beta = numbers[after:first]
        found[int(at)] = Solution(
            beta, float(offset), float(objective), float(gap), bool(converged), Counters(**values)
        )
    return found


__all__ = ["LARGEST", "deal", "fits", "in_order", "packed", "unpacked"]
