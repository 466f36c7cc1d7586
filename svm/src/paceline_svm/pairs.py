"""One-vs-one training: a problem for each pair of classes; small ones are spread over the ranks, large ones shared."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline_svm import placement
from paceline_svm.kernels import Kernel
from paceline_svm.placement import solve
from paceline_svm.problem import Problem, Solution, SolverSettings, feasible
from paceline_svm.sample_forms import Samples, fits_on_every_rank
from paceline_svm.small_problems import SmallProblems
from paceline_svm.training_set import TrainingSet


@dataclass(frozen=True)
class Pairs:
    """All pairs of classes of a training set.

    Attributes:
        data: The training set; its targets are numbers of classes.
        matrix: What the kernel sees of this rank's samples.
        counts: Samples of each class over all ranks, shape (K,).
        costs: Bounds of the coefficients of this rank's samples, shape (N,).
        all_costs: Of all ranks' samples, by ascending number.
        start: Table of coefficients to start from, of all rows, shape (K - 1, rows), or None.
    """

    data: TrainingSet
    matrix: Samples
    counts: NDArray[np.int64]
    costs: NDArray[np.float64]
    all_costs: NDArray[np.float64]
    start: NDArray[np.float64] | None

    @classmethod
    def of(
        cls,
        data: TrainingSet,
        matrix: Samples,
        num_classes: int,
        cost: NDArray[np.float64],
        start: NDArray[np.float64] | None,
    ) -> Pairs:
        """The pairs, given C of each class, shape (K,). Collective."""
        costs = cost[data.targets.astype(np.int64)] * data.weights
        doing = "exchanging weights"
        ids = np.concatenate(data.world.gather_uneven(data.samples.ids, doing))
        everyone = np.concatenate(data.world.gather_uneven(costs, doing))[np.argsort(ids)]
        counts = np.bincount(data.all_targets.astype(np.int64), minlength=num_classes)
        return cls(data, matrix, counts, costs, everyone, start)

    def solve(self, kernel: Kernel, settings: SolverSettings) -> tuple[list[Solution], NDArray[np.float64]]:
        """Solve all. Collective.

        Returns:
            The solutions in the order of `itertools.combinations`, and scikit-learn's table of coefficients of this
            rank's samples, shape (K - 1, N): row r of a sample is its coefficient against the r-th other class.
        """
        counts = self.counts.tolist()
        pairs = list(itertools.combinations(range(len(counts)), 2))
        table = np.zeros((len(counts) - 1, len(self.data.samples)))
        small = [(one, other) for one, other in pairs if counts[one] + counts[other] <= placement.LARGEST]
        if small and not fits_on_every_rank(self.data.world, self.matrix, settings.cache_bytes):
            small = []
        found = self._solve_small(small, kernel, settings, table)
        for pair in pairs:
            if pair not in found:
                found[pair] = self._solve_large(pair, kernel, settings, table)
        return [found[pair] for pair in pairs], table

    def _solve_small(
        self,
        pairs: list[tuple[int, int]],
        kernel: Kernel,
        settings: SolverSettings,
        table: NDArray[np.float64],
    ) -> dict[tuple[int, int], Solution]:
        """Solve pairs that fit a direct solver, and write their coefficients to the table."""
        if not pairs:
            return {}
        data = self.data
        everyone = data.everywhere(self.matrix, np.arange(len(self.matrix)))
        order = np.argsort(data.all_targets, kind="stable")
        samples = placement.in_order(everyone, data.all_ids[order])
        ends = np.cumsum(self.counts)
        begins = ends - self.counts
        one, other = np.array(pairs).T
        bounds = np.stack([begins[one], ends[one], begins[other], ends[other]], axis=1)
        problems = _problems(bounds, self.all_costs[order])
        if self.start is not None:
            members = np.split(order[_members(bounds)], problems.first[1:-1])
            problems.beta[0] = np.concatenate(
                [self._feasible(pair, part) for pair, part in zip(pairs, members, strict=True)]
            )
        found = placement.solve_small(kernel, samples, problems, settings, data.world)
        by_class = np.zeros((len(table), len(order)))  # samples in the order of their classes
        _tabulate(problems, one, other, by_class)
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        table[:] = by_class[:, place[np.searchsorted(data.all_ids, data.samples.ids)]]
        return dict(zip(pairs, found, strict=True))

    def _solve_large(
        self, pair: tuple[int, int], kernel: Kernel, settings: SolverSettings, table: NDArray[np.float64]
    ) -> Solution:
        """Solve a pair on all ranks together, and write its coefficients to the table."""
        data, (one, other) = self.data, pair
        mine, samples, num = data.part(np.isin(data.all_targets, pair), self.matrix)
        is_one = data.targets[mine] == one
        y, cost = np.where(is_one, 1.0, -1.0), self.costs[mine]
        everyone = np.flatnonzero(np.isin(data.all_targets, pair))
        places = np.searchsorted(data.all_ids, data.samples.ids)
        problem = Problem(
            kernel=kernel,
            samples=samples,
            num_samples=num,
            linear=-y[None],
            lower=np.minimum(0.0, y * cost)[None],
            upper=np.maximum(0.0, y * cost)[None],
            start=self._feasible(pair, everyone)[np.searchsorted(everyone, places[mine])][None],
        )
        solution = solve(problem, settings, data.world)
        table[other - 1, mine[is_one]] = solution.beta[is_one]
        table[one, mine[~is_one]] = solution.beta[~is_one]
        return solution

    def _feasible(self, pair: tuple[int, int], members: NDArray[np.int64]) -> NDArray[np.float64]:
        """A start within the bounds, of sum zero, as near as that is to the coefficients to start from.

        Args:
            pair: Of classes.
            members: Their samples, as places among `data.all_ids`.
        """
        if self.start is None:
            return np.zeros(len(members))
        one, other = pair
        ids, is_one = self.data.all_ids[members], self.data.all_targets[members] == one
        last = np.where(is_one, self.start[other - 1, ids], self.start[one, ids])
        cost = self.all_costs[members]
        return feasible(last, np.where(is_one, 0.0, -cost), np.where(is_one, cost, 0.0))


def _members(bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Samples of pairs of ranges (a, b, c, d), one pair after another."""
    begins, sizes = bounds[:, ::2].ravel(), (bounds[:, 1::2] - bounds[:, ::2]).ravel()
    ends = np.cumsum(sizes)
    return np.asarray(np.arange(ends[-1]) + np.repeat(begins - (ends - sizes), sizes))


def _problems(bounds: NDArray[np.int64], costs: NDArray[np.float64]) -> SmallProblems:
    """A problem for each pair of ranges of samples, the first range with positive coefficients; all are zero."""
    sizes = bounds[:, 1::2] - bounds[:, ::2]
    sign = np.repeat(np.tile([1.0, -1.0], len(bounds)), sizes.ravel())[None]
    cost = costs[_members(bounds)]
    first = np.concatenate([[0], np.cumsum(sizes.sum(axis=1))])
    lower, upper = np.minimum(0.0, sign * cost), np.maximum(0.0, sign * cost)
    return SmallProblems(bounds, first, -sign, lower, upper, np.zeros_like(sign))


def _tabulate(
    problems: SmallProblems,
    one: NDArray[np.int64],
    other: NDArray[np.int64],
    table: NDArray[np.float64],
) -> None:
    """Write the coefficients of problems of the classes `one` and `other` to scikit-learn's table of all samples."""
    beta, starts = problems.beta[0], problems.first.tolist()
    ranges = zip(problems.bounds.tolist(), starts, one.tolist(), other.tolist(), strict=False)
    for (a, b, c, d), first, i, j in ranges:
        middle, end = first + b - a, first + b - a + d - c
        table[j - 1, a:b], table[i, c:d] = beta[first:middle], beta[middle:end]
