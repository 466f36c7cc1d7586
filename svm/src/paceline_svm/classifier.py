"""SVC: classification by one binary problem for each pair of classes (one-vs-one), as LIBSVM does it."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets

from paceline.errors import ConfigurationError
from paceline_svm.estimator import KernelMachine
from paceline_svm.one_vs_one import Pairs, PairwiseVotes, sigmoid
from paceline_svm.sample_forms import Samples
from paceline_svm.training_set import Facts, Part, TrainingSet

_NUM_FOLDS = 5


class SVC(PairwiseVotes, KernelMachine):
    """A support vector classifier with scikit-learn's contract, trained by all ranks of a process group.

    In one process it takes the place of `sklearn.svm.SVC`. Where torch's default process group is initialised, every
    rank calls `fit`, and all end with the same model.

    Args:
        C: Price of a violated margin.
        kernel: `rbf`, `linear`, `poly`, `sigmoid`, `precomputed`, or a function of two arrays of rows.
        degree: Of `poly`.
        gamma: Of `rbf`, `poly` and `sigmoid`; `scale` is 1 / (features * variance), `auto` is 1 / features.
        coef0: Of `poly` and `sigmoid`.
        shrinking: Whether samples that can no longer be in a violating pair are left out for a while. True is
            `auto`, False `none`; or a heuristic's name, such as `adaptive`, `multi-5%` or `single-500`.
        tol: Largest violation of optimality, over all samples.
        cache_size: Megabytes for kernel rows on each rank; at least one working set's rows are kept. `auto` is 500. If
            no sample may be shrunk, it grows by the rows that would be computed again, up to half of the free memory.
        class_weight: Factors of C by class, or `balanced`. A class of weight 0, or whose samples have none, is in
            `classes_`, but is never predicted.
        verbose: Print a line a working set to stderr on rank 0; or a function that takes a `Progress`.
        max_iter: Limit of pair updates (LIBSVM's iterations) for each pair of classes; -1 for none.
        decision_function_shape: `ovr` or `ovo`.
        break_ties: Break ties of the votes by the decision function (with `ovr`).
        probability: Make `predict_proba` available; costs five more fits, on parts of the training set.
        random_state: Seed of those parts.
        warm_start: Whether to start from the last fit's coefficients, if it was of as many rows and the same classes.
        rows: In a process group. `own`: each rank passes its own rows. `all`: every rank passes all rows, which are
            dealt out. `alone`: the process trains without the others.

    Attributes:
        classes_: Labels, shape (K,).
        class_weight_: Factors of C, shape (K,).
        support_: Numbers of the support vectors in the training set of all ranks, grouped by class.
        support_vectors_: Their rows.
        n_support_: How many each class has, shape (K,).
        dual_coef_: Their coefficients, shape (K - 1, support vectors), as in scikit-learn.
        intercept_: Shape (K * (K - 1) / 2,).
        n_iter_: Pair updates, for each pair of classes.
        gap_: Largest violation over all samples, computed in double precision, for each pair.
        objective_: Dual objective (to be minimised), for each pair.
        counters_: What each pair of classes took, a tuple of `Counters`.
        fit_status_: 0 if every pair converged, otherwise 1.
        shape_fit_: Rows and features of the training set of all ranks.
        probA_: Slope of each pair's sigmoid, with `probability`.
        probB_: Its shift.
        n_features_in_: Features.

    Source:
        The algorithm: docs/notebook/svm.md, "How it works".
    """

    def __init__(
        self,
        *,
        C: float = 1.0,
        kernel: Any = "rbf",
        degree: float = 3,
        gamma: Any = "scale",
        coef0: float = 0.0,
        shrinking: bool | str = True,
        tol: float = 1e-3,
        cache_size: float | str = "auto",
        class_weight: Any = None,
        verbose: Any = False,
        max_iter: int = -1,
        decision_function_shape: str = "ovr",
        break_ties: bool = False,
        probability: Any = False,
        random_state: Any = None,
        warm_start: bool = False,
        rows: str = "own",
    ) -> None:
        self.C = C
        self.kernel = kernel
        self.degree = degree
        self.gamma = gamma
        self.coef0 = coef0
        self.shrinking = shrinking
        self.tol = tol
        self.cache_size = cache_size
        self.class_weight = class_weight
        self.verbose = verbose
        self.max_iter = max_iter
        self.decision_function_shape = decision_function_shape
        self.break_ties = break_ties
        self.probability = probability
        self.random_state = random_state
        self.warm_start = warm_start
        self.rows = rows

    def _check_parameters(self) -> None:
        super()._check_parameters()
        self._check_number("C", 0.0, np.inf, is_open=True)
        if not isinstance(self.probability, (bool, np.bool_)):
            self._refuse("probability", "a bool")
        if self.decision_function_shape not in ("ovr", "ovo"):
            self._refuse("decision_function_shape", "a str among ('ovo', 'ovr')")

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> SVC:
        """Train.

        Args:
            X: Rows, shape (N, D), dense or CSR; for a precomputed kernel rows of the Gram matrix of all samples.
            y: Labels, shape (N,).
            sample_weight: Factors of C, shape (N,).

        Contract:
            Collective where a process group is initialised and `rows` is not `alone`: every rank, same parameters.
            Blocks: yes.  Afterwards: the same model on every rank.

        Raises:
            ValueError: The data or a parameter cannot be; on every rank if it is so on one.
            PeerLostError: A rank died, hung or cannot be reached.
        """
        self._fit(X, y, sample_weight)
        return self

    def _checked_targets(self, y: Any) -> Any:
        check_classification_targets(y)
        return y

    def _needs_one(self, X: Any, y: Any) -> bool:
        # Pairs of classes are dealt out.
        return super()._needs_one(X, y) and len(np.unique(y)) == 2

    def _alike(self, X: Any, y: Any, weights: Any) -> dict[str, str]:
        return {**super()._alike(X, y, weights), "y": "text" if y.dtype.kind == "U" else str(y.dtype)}

    def _labels(self, y: Any) -> Any:
        labels, counts = np.unique(y, return_counts=True)
        return None if self.rows == "all" else (labels.tolist(), counts.tolist())

    def _encoded(self, part: Part, facts: list[Facts]) -> NDArray[np.float64]:
        """Return labels as numbers that mean the same on every rank."""
        if self.rows == "all":
            everyone = [np.unique(part.passed_y, return_counts=True)]
        else:
            dtype = "U" if part.y.dtype.kind == "U" else part.y.dtype  # text may be longer elsewhere
            everyone = [
                (np.array(found, dtype), np.array(times)) for found, times in (one.labels for one in facts)
            ]
        self.classes_ = np.unique(np.concatenate([found for found, _ in everyone]))
        if len(self.classes_) < 2:
            raise ConfigurationError(
                f"The number of classes has to be greater than one; got {len(self.classes_)} class"
            )
        self.class_weight_ = np.ones(len(self.classes_))
        if self.class_weight is not None:
            occurring = np.concatenate([np.repeat(found, times) for found, times in everyone])
            self.class_weight_ = compute_class_weight(self.class_weight, classes=self.classes_, y=occurring)
        if not (self.class_weight_ >= 0).all():
            raise ConfigurationError(
                "The 'class_weight' parameter of SVC must not be negative; "
                f"the classes' weights are {self.class_weight_.tolist()}."
            )
        return np.asarray(np.searchsorted(self.classes_, part.y), np.float64)

    def _counts(self, data: TrainingSet) -> NDArray[np.bool_]:
        """Select the samples of all ranks that are of a class that counts."""
        return np.asarray(self.class_weight_[data.all_targets.astype(np.int64)] > 0)

    def _solve_all(self, data: TrainingSet, matrix: Samples) -> None:
        data, matrix = data.subset(self._counts(data), matrix)
        start = self._start(data, (len(self.classes_) - 1, data.num_rows))
        pairs = Pairs.of(data, matrix, len(self.classes_), self.C * self.class_weight_, start)
        solutions, table = pairs.solve(self._kernel, self._settings())
        for solution in solutions:
            self._warn(solution)
        at = self._keep(data, table, [solution.offset for solution in solutions], solutions)
        self._group_by_class(data.all_targets[at].astype(np.int64))
        sign = -1.0 if len(self.classes_) == 2 else 1.0
        self.dual_coef_ = sign * self._table
        self.intercept_ = -sign * self._offsets
        self.n_iter_ = np.array([solution.counters.num_steps for solution in solutions], np.int32)
        self.gap_ = np.array([solution.gap for solution in solutions])
        if self.probability:
            self._calibrate(data, matrix)

    def _shown(self, objectives: list[float]) -> Any:
        return np.array(objectives)

    def _coefficients_of(self, problem: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        one, other = (classes[problem] for classes in self._pairs())
        ends = np.cumsum(self.n_support_)
        first, second = (np.arange(ends[c] - self.n_support_[c], ends[c]) for c in (one, other))
        beta = np.concatenate([self._table[other - 1, first], self._table[one, second]])
        return np.concatenate([first, second]), beta

    def _calibrate(self, data: TrainingSet, matrix: Samples) -> None:
        """Fit a sigmoid for each pair to decision values of samples left out. Collective."""
        seed = self.random_state
        if isinstance(seed, np.random.RandomState):
            seed = int(seed.randint(2**31))
        fold = _folds(data.all_targets, int(data.communicator.broadcast(np.array([_seed(seed)]), "")[0]))
        num = len(self.classes_)
        pairs = list(itertools.combinations(range(num), 2))
        values = np.zeros((len(data.samples), len(pairs)))
        mine = fold[np.searchsorted(data.all_ids, data.samples.ids)]
        for left_out in np.unique(fold):
            model: SVC = copy.copy(self)
            model.probability = model.warm_start = False
            model._solve_all(*data.subset(fold != left_out, matrix))
            at = np.flatnonzero(mine == left_out)
            values[at] = model._values_of_pairs(data.samples.take(at).rows)  # type: ignore[attr-defined]
        doing = "calibrating"
        everyone = np.concatenate(data.communicator.gather_uneven(values.ravel(), doing)).reshape(
            -1, len(pairs)
        )
        targets = np.concatenate(data.communicator.gather_uneven(data.targets, doing))
        found = np.zeros((len(pairs), 2))
        for pair, (one, other) in enumerate(pairs):
            chosen = np.isin(targets, (one, other))
            found[pair] = sigmoid(everyone[chosen, pair], targets[chosen] == one)
        self.probA_, self.probB_ = data.communicator.broadcast(found, doing).T

    def _group_by_class(self, labels: NDArray[np.int64]) -> None:
        """Put the support vectors in the order of their classes."""
        order = np.argsort(labels, kind="stable")
        self.support_ = self.support_[order]
        self._table = np.ascontiguousarray(self._table[:, order])
        if self.support_vectors_.shape[0]:
            self.support_vectors_ = self.support_vectors_[order]
        self.n_support_ = np.bincount(labels, minlength=len(self.classes_)).astype(np.int32)

    def _check_all(self, data: TrainingSet) -> None:
        super()._check_all(data)
        present = np.unique(data.all_targets[self._counts(data)])
        if len(present) == 0:
            raise ConfigurationError("Invalid input - all classes have the weight 0 in class_weight.")
        if len(present) == 1:
            raise ConfigurationError(
                "Invalid input - all samples with positive weights belong to the same class."
            )


def _folds(labels: NDArray[np.float64], seed: int | None) -> NDArray[np.int64]:
    """Return the fold of every sample, each class spread evenly over all folds.

    Args:
        labels: Of all samples, the same on every rank.
        seed: Decides who is with whom.
    """
    counts = np.unique(labels, return_counts=True)[1]
    if counts.min() < 2:
        raise ConfigurationError(
            "probability=True fits models on parts of the training set, so every class needs at least 2 samples; "
            f"one has {counts.min()}. Add samples, or leave probability out."
        )
    generator = np.random.default_rng(seed)
    fold = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        fold[generator.permutation(members)] = np.arange(len(members)) % min(_NUM_FOLDS, counts.min())
    return fold


def _seed(seed: Any) -> int:
    return int(np.random.default_rng(seed).integers(2**31))
