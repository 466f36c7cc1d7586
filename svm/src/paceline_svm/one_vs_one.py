"""One-vs-one: training a problem for each pair of classes, and from decision values of pairs to labels.

Small problems are spread over the ranks, large ones are shared by all. Labels are found by votes, probabilities by
Platt's sigmoids and pairwise coupling.

Source:
    Platt 1999 with the targets of Lin, Lin & Weng 2007; pairwise coupling: Wu, Lin & Weng 2004, second method.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit, log_expit
from sklearn.base import ClassifierMixin
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from paceline.errors import ConfigurationError
from paceline_svm import placement
from paceline_svm.kernels import Kernel
from paceline_svm.placement import solve
from paceline_svm.problem import Counters, Extent, Problem, Solution, SolverSettings, feasible
from paceline_svm.sample_forms import Samples, fits_on_every_rank, gather_samples
from paceline_svm.small_problems import SmallProblems
from paceline_svm.training_set import TrainingSet


@dataclass(frozen=True)
class Pairs:
    """All pairs of classes of a training set.

    Attributes:
        data: The training set; its targets are numbers of classes.
        matrix: What the kernel sees of this rank's samples.
        counts: Samples of each class over all ranks, shape (K,).
        all_costs: Bounds of the coefficients of all ranks' samples, by ascending number.
        start: Table of coefficients to start from, of all rows, shape (K - 1, rows), or None.
    """

    data: TrainingSet
    matrix: Samples
    counts: NDArray[np.int64]
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
        """Return the pairs, given C of each class, shape (K,)."""
        all_classes = data.all_targets.astype(np.int64)
        costs = cost[all_classes] * data.all_weights
        return cls(data, matrix, np.bincount(all_classes, minlength=num_classes), costs, start)

    def solve(self, kernel: Kernel, settings: SolverSettings) -> tuple[list[Solution], NDArray[np.float64]]:
        """Solve all. Collective.

        Returns:
            The solutions in the order of `itertools.combinations`, and scikit-learn's table of coefficients of this
            rank's samples, shape (K - 1, N). Row r of a sample is its coefficient against the r-th other class.
        """
        counts = self.counts.tolist()
        pairs = list(itertools.combinations(range(len(counts)), 2))
        table = np.zeros((len(counts) - 1, len(self.data.samples)))
        # A class without samples loses by the margin 1 everywhere: there is nothing to solve.
        found = {
            (one, other): _decided((counts[one] > 0) - (counts[other] > 0))
            for one, other in pairs
            if not (counts[one] and counts[other])
        }
        few = [(one, other) for one, other in pairs if counts[one] + counts[other] <= placement.LARGEST]
        small = [pair for pair in few if pair not in found]
        extent = self.data.extent(np.ones(len(self.all_costs), np.bool_))
        if not fits_on_every_rank(extent.num_numbers, settings.cache_bytes):
            small = []
        found |= self._solve_small(small, extent, kernel, settings, table)
        for pair in pairs:
            if pair not in found:
                found[pair] = self._solve_large(pair, kernel, settings, table)
        return [found[pair] for pair in pairs], table

    def _solve_small(
        self,
        pairs: list[tuple[int, int]],
        extent: Extent,
        kernel: Kernel,
        settings: SolverSettings,
        table: NDArray[np.float64],
    ) -> dict[tuple[int, int], Solution]:
        """Solve pairs that fit a direct solver, and write their coefficients to the table."""
        if not pairs:
            return {}
        data = self.data
        doing = "exchanging samples"
        everyone = gather_samples(data.communicator, self.matrix, doing, extent.most_numbers)
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
        found = placement.solve_small(kernel, samples, problems, settings, data.communicator)
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
        of_all = np.isin(data.all_targets, pair)
        mine, samples, extent = data.part(of_all, self.matrix)
        members = np.flatnonzero(of_all)
        y = np.where(data.all_targets[members] == one, 1.0, -1.0)
        cost = self.all_costs[members]
        problem = Problem(
            kernel=kernel,
            samples=samples,
            extent=extent,
            linear=-y[None],
            lower=np.minimum(0.0, y * cost)[None],
            upper=np.maximum(0.0, y * cost)[None],
            start=self._feasible(pair, members)[None],
        )
        solution = solve(problem, settings, data.communicator)
        is_one = data.targets[mine] == one
        table[other - 1, mine[is_one]] = solution.beta[is_one]
        table[one, mine[~is_one]] = solution.beta[~is_one]
        return solution

    def _feasible(self, pair: tuple[int, int], members: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return a start within the bounds and of sum zero, as near as possible to the given coefficients.

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


def _decided(value: int) -> Solution:
    """Return a problem without coefficients, whose decision function is this value."""
    return Solution(np.zeros(0), -float(value), 0.0, 0.0, True, Counters(*[0] * len(Counters._fields)))


def _members(bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return samples of pairs of ranges (a, b, c, d), one pair after another."""
    begins, sizes = bounds[:, ::2].ravel(), (bounds[:, 1::2] - bounds[:, ::2]).ravel()
    ends = np.cumsum(sizes)
    return np.asarray(np.arange(ends[-1]) + np.repeat(begins - (ends - sizes), sizes))


def _problems(bounds: NDArray[np.int64], costs: NDArray[np.float64]) -> SmallProblems:
    """Return a problem for each pair of ranges of samples. The first range's signs are positive; all begin at 0."""
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


_ROWS_AT_ONCE = 4_096
_FEW_VALUES = 1 << 18  # kernel values that are computed for all classes at once


def _has_probabilities(model: PairwiseVotes) -> bool:
    if not model.probability:
        raise AttributeError("predict_proba is only available when SVC was made with probability=True")
    return True


class PairwiseVotes(ClassifierMixin):  # type: ignore[misc]
    """The predicting part of a classifier that has a kernel expansion for each pair of classes.

    Mixed into a `KernelMachine`, whose expansion it evaluates, and before it in the order of bases.
    """

    def decision_function(self, X: Any) -> NDArray[np.float64]:
        """Signed distances, up to a factor.

        Args:
            X: Rows, shape (N, D), dense, or CSR if trained on CSR.

        Returns:
            Shape (N,) for two classes, positive for the second; else (N, K) for `ovr`, (N, pairs) for `ovo`.
        """
        check_is_fitted(self)
        if len(self.classes_) == 2:
            return np.asarray(-self._decisions(X))
        values = self._decisions_of_pairs(X)
        if self.decision_function_shape == "ovo":
            return values
        votes, confidences = self._tally(values)
        # Confidences only break ties: they are squeezed into (-1/3, 1/3).
        return np.asarray(votes + confidences / (3 * (np.abs(confidences) + 1)))

    @available_if(_has_probabilities)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Return probabilities of the classes, shape (N, K); needs `probability=True` before `fit`."""
        check_is_fitted(self)
        values = self._values_of_pairs(self._seen_rows(X))
        one, other = self._pairs()
        is_present = self.n_support_ > 0
        pairwise = expit(-(self.probA_ * values + self.probB_))[:, is_present[one] & is_present[other]]
        found = np.zeros((len(values), len(self.classes_)))
        found[:, is_present] = coupled(pairwise, int(is_present.sum()))
        return found

    @available_if(_has_probabilities)  # type: ignore[untyped-decorator]
    def predict_log_proba(self, X: Any) -> NDArray[np.float64]:
        """Return logarithms of `predict_proba`."""
        with np.errstate(divide="ignore"):  # of a class that is never predicted
            return np.asarray(np.log(self.predict_proba(X)))

    def _values_of_pairs(self, X: Any) -> NDArray[np.float64]:
        """Decision values of all pairs, one pair included, positive for the first class; shape (N, pairs)."""
        if len(self.classes_) == 2:
            return np.asarray(self._expansion(X, slice(None)) - self._offsets)
        return self._values(X)

    def _decisions_of_pairs(self, X: Any) -> NDArray[np.float64]:
        """Return the values of all pairs of classes, shape (N, pairs). All pairs of a class share its kernel values."""
        return self._values(self._seen_rows(X))

    def _values(self, X: Any) -> NDArray[np.float64]:
        one, other = self._pairs()
        values = np.empty((X.shape[0], len(one)))
        for first in range(0, X.shape[0], _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            sums = self._sums_by_class(X[rows])
            values[rows] = (sums[one, other - 1] + sums[other, one]).T - self._offsets
        return values

    def _sums_by_class(self, X: Any) -> NDArray[np.float64]:
        """Kernel values of each class's support vectors by its rows of the table, shape (K, K - 1, N)."""
        ends = np.cumsum(self.n_support_)
        members = [slice(end - num, end) for end, num in zip(ends, self.n_support_, strict=True)]
        if ends[-1] * X.shape[0] <= _FEW_VALUES and not callable(self.kernel):
            block = self._kernel_values(X)
            return np.stack([self._table[:, chosen] @ block[chosen] for chosen in members])
        nothing = np.zeros((len(self._table), X.shape[0]))
        return np.stack(
            [self._expansion(X, chosen).T if chosen.stop > chosen.start else nothing for chosen in members]
        )

    def _pairs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First and second class of every pair."""
        one, other = np.triu_indices(len(self.classes_), 1)
        return one, other

    def _tally(self, values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return votes and summed confidences of each class, shape (N, K)."""
        one, other = self._pairs()
        wins, loses = np.zeros((2, len(one), len(self.classes_)))
        wins[np.arange(len(one)), one] = loses[np.arange(len(one)), other] = 1.0
        votes, confidences = np.empty((2, len(values), len(self.classes_)))
        for first in range(0, len(values), _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            votes[rows] = (values[rows] >= 0) @ wins + (values[rows] < 0) @ loses
            confidences[rows] = values[rows] @ (wins - loses)
        return votes, confidences

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the labels of the rows of X, shape (N,). Two classes go by sign, more by votes."""
        check_is_fitted(self)
        if self.break_ties and self.decision_function_shape == "ovo":
            raise ConfigurationError("break_ties must be False when decision_function_shape is 'ovo'")
        if len(self.classes_) == 2:
            winners = (self.decision_function(X) > 0).astype(np.intp)
        elif self.break_ties:
            winners = self.decision_function(X).argmax(axis=1)
        else:
            winners = self._tally(self._decisions_of_pairs(X))[0].argmax(axis=1)
        return np.asarray(self.classes_[winners])

    def _weights_of_features(self) -> Any:
        """Return the values of every pair of classes, shape (pairs, D)."""
        ends = np.cumsum(self.n_support_)
        members = [slice(end - num, end) for end, num in zip(ends, self.n_support_, strict=True)]
        weights = [
            self._signed(self.dual_coef_[other - 1 : other, members[one]])
            @ self.support_vectors_[members[one]]
            + self._signed(self.dual_coef_[one : one + 1, members[other]])
            @ self.support_vectors_[members[other]]
            for one, other in itertools.combinations(range(len(self.classes_)), 2)
        ]
        return sp.vstack(weights, format="csr") if self._sparse else np.vstack(weights)


def sigmoid(decisions: NDArray[np.float64], is_first: NDArray[np.bool_]) -> tuple[float, float]:
    """(A, B), such that 1 / (1 + exp(A d + B)) is the probability of the first class at decision value d."""
    num_first, num_second = is_first.sum(), (~is_first).sum()
    target = np.where(is_first, (num_first + 1) / (num_first + 2), 1 / (num_second + 2))

    def loss(parameters: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        z = parameters[0] * decisions + parameters[1]
        value = -(target * log_expit(-z) + (1 - target) * log_expit(z)).sum()
        slope = target - expit(-z)
        return float(value), np.array([(slope * decisions).sum(), slope.sum()])

    start = np.array([0.0, np.log((num_second + 1) / (num_first + 1))])
    found = minimize(loss, start, jac=True, method="L-BFGS-B").x
    return float(found[0]), float(found[1])


def coupled(pairwise: NDArray[np.float64], num_classes: int) -> NDArray[np.float64]:
    """Return one distribution from the probabilities of pairs.

    Args:
        pairwise: P(first | first or second) of each pair, in the order of `itertools.combinations`, shape (N, pairs).
        num_classes: K.

    Returns:
        Shape (N, K): p with the least sum over pairs of (r_ji p_i - r_ij p_j)^2, not negative, of sum 1.
    """
    if num_classes == 2:
        return np.hstack([pairwise, 1 - pairwise])
    pairwise = np.clip(pairwise, 1e-7, 1 - 1e-7)
    Q = np.zeros((len(pairwise), num_classes + 1, num_classes + 1))
    for pair, (i, j) in enumerate(itertools.combinations(range(num_classes), 2)):
        r = pairwise[:, pair]
        Q[:, i, i] += (1 - r) ** 2
        Q[:, j, j] += r**2
        Q[:, i, j] = Q[:, j, i] = -r * (1 - r)
    Q[:, -1, :-1] = Q[:, :-1, -1] = 1.0
    wanted = np.zeros((len(pairwise), num_classes + 1, 1))
    wanted[:, -1] = 1.0
    p = np.maximum(np.linalg.solve(Q, wanted)[:, :-1, 0], 0.0)
    return np.asarray(p / p.sum(axis=1, keepdims=True))
