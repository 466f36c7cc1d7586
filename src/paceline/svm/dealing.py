"""Small problems dealt out over the ranks, and their solutions back to every rank."""

from __future__ import annotations

import dataclasses
import itertools
import threading

import numpy as np
from numpy.typing import NDArray

from paceline.svm.compiled import FAR
from paceline.svm.direct import LARGEST, DirectSolver, with_all_values
from paceline.svm.exchange import fits
from paceline.svm.kernels import Kernel
from paceline.svm.problem import Counters, Solution, SolverSettings
from paceline.svm.samples import GramSamples, Samples
from paceline.svm.small_problems import (
    FIELDS,
    FREE_SUM,
    LEAST,
    MOST,
    NUM_FREE,
    OBJECTIVE,
    STEPS,
    TURNS,
    VALUES,
    SmallProblems,
)
from paceline.svm.threads import each, num_threads
from paceline.svm.world import World

_DOING = "solving small problems"
_PIECES = 4  # of the work, for each thread


def in_order(samples: Samples, ids: NDArray[np.int64]) -> Samples:
    """Those samples out of all, in that order; of a Gram matrix the columns too, renumbered from 0."""
    chosen = samples.take(np.argsort(samples.ids)[np.searchsorted(np.sort(samples.ids), ids)])
    if isinstance(chosen, GramSamples):
        return GramSamples(np.arange(len(ids)), chosen.rows[:, ids])
    return chosen


def deal(
    kernel: Kernel,
    samples: Samples,
    problems: SmallProblems,
    settings: SolverSettings,
    world: World,
) -> list[Solution]:
    """Solve problems, each on one rank. Collective; every rank gets all solutions, `beta` of all samples of a problem.

    Args:
        kernel: Between samples.
        samples: Of all problems, the same on every rank.
        problems: The same on every rank; their coefficients are changed.
        settings: The same on every rank.
        world: The ranks.
    """
    outcomes = np.zeros((len(problems.bounds), FIELDS))
    hands = _hands(problems, world.num_ranks)
    mine = hands[world.rank]
    if len(mine):
        _solve(kernel, samples, problems, settings, mine, outcomes)
    if world.num_ranks > 1:
        numbers = np.concatenate([outcomes[mine].ravel(), problems.beta[:, _columns(problems, mine)].ravel()])
        for hand, found in zip(hands, world.gather_uneven(numbers, _DOING), strict=True):
            columns, num = _columns(problems, hand), outcomes[hand].size
            outcomes[hand] = found[:num].reshape(-1, FIELDS)
            problems.beta[:, columns] = found[num:].reshape(len(problems.beta), len(columns))
    return _solutions(problems, outcomes, settings.tol, world)


def _hands(problems: SmallProblems, num_ranks: int) -> list[NDArray[np.int64]]:
    """Which problems every rank solves, ascending: the largest first, to the one with the least to do."""
    if num_ranks == 1:
        return [np.arange(len(problems.bounds))]
    load = np.zeros(num_ranks)
    rank_of = np.empty(len(problems.bounds), np.int64)
    for at in np.argsort(-problems.sizes, kind="stable"):
        rank_of[at] = load.argmin()
        load[rank_of[at]] += problems.sizes[at]
    return [np.flatnonzero(rank_of == rank) for rank in range(num_ranks)]


def _columns(problems: SmallProblems, which: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where the coefficients of some problems are."""
    is_there = np.zeros(len(problems.bounds), np.bool_)
    is_there[which] = True
    return np.flatnonzero(np.repeat(is_there, problems.sizes))


def _solve(
    kernel: Kernel,
    samples: Samples,
    problems: SmallProblems,
    settings: SolverSettings,
    which: NDArray[np.int64],
    outcomes: NDArray[np.float64],
) -> None:
    """Solve some on this rank's threads, each of which has its part of the cache."""
    samples = with_all_values(kernel, samples, problems, settings.cache_bytes)
    num = min(num_threads(), len(which))
    part = dataclasses.replace(settings, cache_bytes=settings.cache_bytes / num)
    mine = threading.local()

    def one(piece: NDArray[np.int64]) -> None:
        if not hasattr(mine, "solver"):
            mine.solver = DirectSolver(kernel, samples, problems, part, outcomes)
        mine.solver.solve(piece)

    each(one, np.array_split(which, min(_PIECES * num, len(which)) if num > 1 else 1))


def _solutions(
    problems: SmallProblems, outcomes: NDArray[np.float64], tol: float, world: World
) -> list[Solution]:
    extremes = outcomes[:, [LEAST, MOST]]
    least, most = np.where(np.abs(extremes) == FAR, np.copysign(np.inf, extremes), extremes).T
    gaps = np.maximum(most - least, 0.0)
    offsets = np.where(
        outcomes[:, NUM_FREE] > 0,
        outcomes[:, FREE_SUM] / np.maximum(outcomes[:, NUM_FREE], 1),
        (least + most) / 2,
    )
    beta, first = problems.beta.sum(axis=0), problems.first.tolist()
    whole = outcomes[:, [TURNS, STEPS, VALUES]].astype(np.int64).tolist()
    words = zip(
        itertools.pairwise(first),
        offsets.tolist(),
        outcomes[:, OBJECTIVE].tolist(),
        gaps.tolist(),
        whole,
        strict=True,
    )
    return [
        Solution(
            beta[begin:end],
            offset,
            objective,
            gap,
            gap <= tol,
            Counters(turns, steps, num_values, 0, end - begin, 0, world.num_collectives, world.num_bytes),
        )
        for (begin, end), offset, objective, gap, (turns, steps, num_values) in words
    ]


__all__ = ["LARGEST", "deal", "fits", "in_order"]
