"""SVR and OneClassSVM: estimators whose samples make one problem.

Epsilon-insensitive regression has two dual variables a sample, one for each side of the tube. Novelty detection learns
the support of one class (Schoelkopf et al. 2001).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import OutlierMixin, RegressorMixin

from paceline_svm.estimator import KernelMachine
from paceline_svm.problem import Problem, feasible, filled
from paceline_svm.sample_forms import Samples
from paceline_svm.training_set import TrainingSet


class SVR(RegressorMixin, KernelMachine):  # type: ignore[misc]
    """Epsilon-insensitive support vector regression with scikit-learn's contract, trained by all ranks.

    In one process it takes the place of `sklearn.svm.SVR`. Where torch's default process group is initialised, every
    rank calls `fit`, and all end with the same model.

    Args:
        kernel: As in `SVC`; so are `degree`, `gamma`, `coef0`, `tol`, `shrinking`, `cache_size`, `verbose`,
            `max_iter` and `rows`.
        C: Price of a deviation beyond `epsilon`.
        warm_start: Whether to start from the last fit's coefficients, if it was of as many rows.
        epsilon: Deviations up to this cost nothing; in units of the targets.

    Attributes:
        support_: Numbers of the support vectors in the training set of all ranks, ascending.
        support_vectors_: Their rows.
        dual_coef_: Their coefficients, shape (1, support vectors).
        intercept_: Shape (1,).
        n_support_: Shape (1,).
        n_iter_: Pair updates.
        gap_: Largest violation over all samples, computed in double precision.
        objective_: Dual objective (to be minimised).
        counters_: What it took, a tuple of one `Counters`.
    """

    def __init__(
        self,
        *,
        kernel: Any = "rbf",
        degree: float = 3,
        gamma: Any = "scale",
        coef0: float = 0.0,
        tol: float = 1e-3,
        C: float = 1.0,
        epsilon: float = 0.1,
        shrinking: bool | str = True,
        cache_size: float | str = "auto",
        verbose: Any = False,
        max_iter: int = -1,
        rows: str = "own",
        warm_start: bool = False,
    ) -> None:
        self.kernel = kernel
        self.degree = degree
        self.gamma = gamma
        self.coef0 = coef0
        self.tol = tol
        self.C = C
        self.epsilon = epsilon
        self.shrinking = shrinking
        self.cache_size = cache_size
        self.verbose = verbose
        self.max_iter = max_iter
        self.rows = rows
        self.warm_start = warm_start

    def _check_parameters(self) -> None:
        super()._check_parameters()
        self._check_number("C", 0.0, np.inf, is_open=True)
        self._check_number("epsilon", 0.0)

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> SVR:
        """Train; arguments, contract and errors as in `SVC.fit`, with real targets y."""
        self._fit(X, y, sample_weight)
        return self

    def _solve_all(self, data: TrainingSet, matrix: Samples) -> None:
        _, samples, extent = data.whole(matrix)
        y, cost = data.all_targets, self.C * data.all_weights
        nothing = np.zeros(len(y))
        start = np.zeros((2, len(y)))
        last = self._start(data, (1, data.num_rows))
        if last is not None:
            beta = feasible(last[0, data.all_ids], -cost, cost)
            start = np.stack([np.maximum(beta, 0.0), np.minimum(beta, 0.0)])
        problem = Problem(
            kernel=self._kernel,
            samples=samples,
            extent=extent,
            linear=np.stack([self.epsilon - y, -self.epsilon - y]),
            lower=np.stack([nothing, -cost]),
            upper=np.stack([cost, nothing]),
            start=start,
        )
        self._keep_one(data, self._solve(data, problem))

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Predicted targets of the rows of X, shape (N,)."""
        return self._decisions(X)


class OneClassSVM(OutlierMixin, KernelMachine):  # type: ignore[misc]
    """A one-class support vector machine with scikit-learn's contract, trained by all ranks.

    In one process it takes the place of `sklearn.svm.OneClassSVM`. Where torch's default process group is
    initialised, every rank calls `fit`, and all end with the same model.

    Args:
        kernel: As in `SVC`; so are `degree`, `gamma`, `coef0`, `tol`, `shrinking`, `cache_size`, `verbose`,
            `max_iter`, `rows` and `warm_start`.
        nu: Upper bound of the fraction of outliers, lower bound of that of support vectors; in (0, 1].

    Attributes:
        offset_: The decision function is the score less this.
        support_: Numbers of the support vectors in the training set of all ranks, ascending.
        support_vectors_: Their rows.
        dual_coef_: Their coefficients, shape (1, support vectors).
        intercept_: Minus the offset, shape (1,).
        n_support_: Shape (1,).
        n_iter_: Pair updates.
        gap_: Largest violation over all samples, computed in double precision.
        objective_: Dual objective (to be minimised).
        counters_: What it took, a tuple of one `Counters`.
    """

    def __init__(
        self,
        *,
        kernel: Any = "rbf",
        degree: float = 3,
        gamma: Any = "scale",
        coef0: float = 0.0,
        tol: float = 1e-3,
        nu: float = 0.5,
        shrinking: bool | str = True,
        cache_size: float | str = "auto",
        verbose: Any = False,
        max_iter: int = -1,
        rows: str = "own",
        warm_start: bool = False,
    ) -> None:
        self.kernel = kernel
        self.degree = degree
        self.gamma = gamma
        self.coef0 = coef0
        self.tol = tol
        self.nu = nu
        self.shrinking = shrinking
        self.cache_size = cache_size
        self.verbose = verbose
        self.max_iter = max_iter
        self.rows = rows
        self.warm_start = warm_start

    _needs_targets = False

    def _check_parameters(self) -> None:
        super()._check_parameters()
        self._check_number("nu", 0.0, 1.0, is_open=True)

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> OneClassSVM:
        """Train; arguments, contract and errors as in `SVC.fit`. `y` is ignored."""
        self._fit(X, None, sample_weight)
        return self

    def _solve_all(self, data: TrainingSet, matrix: Samples) -> None:
        _, samples, extent = data.whole(matrix)
        nothing = np.zeros((1, len(data.all_ids)))
        problem = Problem(
            kernel=self._kernel,
            samples=samples,
            extent=extent,
            linear=nothing,
            lower=nothing,
            upper=data.all_weights[None],
            start=self._feasible(data)[None],
        )
        self._keep_one(data, self._solve(data, problem))
        self.offset_ = -self.intercept_

    def _feasible(self, data: TrainingSet) -> NDArray[np.float64]:
        """Return a start whose sum is nu of all weight: the last fit's, or as in LIBSVM the first samples at bounds."""
        upper = data.all_weights
        total = self.nu * upper.sum()
        last = self._start(data, (1, data.num_rows))
        if last is not None:
            return filled(last[0, data.all_ids], upper, total)
        before = np.concatenate([[0.0], np.cumsum(upper)[:-1]])
        return np.asarray(np.clip(total - before, 0.0, upper))

    def score_samples(self, X: Any) -> NDArray[np.float64]:
        """Return how alike the rows of X are to the class, shape (N,)."""
        return np.asarray(self.decision_function(X) + self.offset_)

    def decision_function(self, X: Any) -> NDArray[np.float64]:
        """Signed distances up to a factor, shape (N,): positive for inliers."""
        return self._decisions(X)

    def predict(self, X: Any) -> NDArray[np.intp]:
        """1 for inliers and -1 for outliers, shape (N,)."""
        return np.where(self.decision_function(X) > 0, 1, -1).astype(np.intp)
