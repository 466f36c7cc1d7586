"""OneClassSVM: novelty detection, which learns the support of one class (Schoelkopf et al. 2001)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import OutlierMixin

from paceline_svm.estimator import KernelMachine
from paceline_svm.problem import Problem, filled
from paceline_svm.sample_forms import Samples
from paceline_svm.training_set import TrainingSet


class OneClassSVM(OutlierMixin, KernelMachine):  # type: ignore[misc]
    """A one-class support vector machine with scikit-learn's contract, trained by all ranks.

    In one process it takes the place of `sklearn.svm.OneClassSVM`. Where torch's default process group is
    initialised, every rank calls `fit`, and all end with the same model.

    Args:
        kernel: As in `SVC`; so are `degree`, `gamma`, `coef0`, `tol`, `shrinking`, `cache_size`, `verbose`,
            `max_iter`, `elimination`, `rows` and `warm_start`.
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
        shrinking: bool = True,
        cache_size: float | str = "auto",
        verbose: Any = False,
        max_iter: int = -1,
        elimination: str = "adaptive",
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
        self.elimination = elimination
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
        mine, samples, num = data.part(np.ones(len(data.all_ids), np.bool_), matrix)
        weights = data.weights[mine]
        problem = Problem(
            kernel=self._kernel,
            samples=samples,
            num_samples=num,
            linear=np.zeros((1, len(mine))),
            lower=np.zeros((1, len(mine))),
            upper=weights[None],
            start=self._feasible(data, mine, samples.ids)[None],
        )
        self._keep_one(data, self._solve(data, problem))
        self.offset_ = -self.intercept_

    def _feasible(
        self, data: TrainingSet, mine: NDArray[np.int64], ids: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """A start whose sum is nu of all weight: the last fit's, or as LIBSVM's the first samples at their bounds.

        Args:
            data: The training set.
            mine: Local positions of this rank's samples in the problem.
            ids: Their numbers in it.
        """
        doing = "exchanging weights"
        order = np.argsort(np.concatenate(data.world.gather_uneven(ids, doing)))
        upper = np.concatenate(data.world.gather_uneven(data.weights[mine], doing))[order]
        total = self.nu * upper.sum()
        last = self._start(data, (1, data.num_rows))
        if last is not None:
            return filled(last[0, data.all_ids], upper, total)[ids]
        before = np.concatenate([[0.0], np.cumsum(upper)[:-1]])
        return np.asarray(np.clip(total - before, 0.0, upper))[ids]

    def score_samples(self, X: Any) -> NDArray[np.float64]:
        """How alike the rows of X are to the class, shape (N,)."""
        return np.asarray(self.decision_function(X) + self.offset_)

    def decision_function(self, X: Any) -> NDArray[np.float64]:
        """Signed distances up to a factor, shape (N,): positive for inliers."""
        return self._decisions(X)

    def predict(self, X: Any) -> NDArray[np.intp]:
        """1 for inliers and -1 for outliers, shape (N,)."""
        return np.where(self.decision_function(X) > 0, 1, -1).astype(np.intp)
