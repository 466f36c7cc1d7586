"""SVR: epsilon-insensitive regression, with two dual variables a sample, one for each side of the tube."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import RegressorMixin

from paceline_svm.estimator import KernelMachine
from paceline_svm.problem import Problem, feasible
from paceline_svm.sample_forms import Samples
from paceline_svm.training_set import TrainingSet


class SVR(RegressorMixin, KernelMachine):  # type: ignore[misc]
    """Epsilon-insensitive support vector regression with scikit-learn's contract, trained by all ranks.

    In one process it takes the place of `sklearn.svm.SVR`. Where torch's default process group is initialised, every
    rank calls `fit`, and all end with the same model.

    Args:
        kernel: As in `SVC`; so are `degree`, `gamma`, `coef0`, `tol`, `shrinking`, `cache_size`, `verbose`,
            `max_iter`, `elimination` and `rows`.
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
        self.C = C
        self.epsilon = epsilon
        self.shrinking = shrinking
        self.cache_size = cache_size
        self.verbose = verbose
        self.max_iter = max_iter
        self.elimination = elimination
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
        mine, samples, num = data.part(np.ones(len(data.all_ids), np.bool_), matrix)
        y, cost = data.targets[mine], self.C * data.weights[mine]
        nothing = np.zeros(len(mine))
        start = np.zeros((2, len(mine)))
        last = self._start(data, (1, data.num_rows))
        if last is not None:
            doing = "exchanging weights"
            ids = np.concatenate(data.world.gather_uneven(data.samples.ids, doing))
            costs = np.zeros(data.num_rows)
            costs[ids] = self.C * np.concatenate(data.world.gather_uneven(data.weights, doing))
            beta = feasible(last[0], -costs, costs)[data.samples.ids]
            start = np.stack([np.maximum(beta, 0.0), np.minimum(beta, 0.0)])
        problem = Problem(
            kernel=self._kernel,
            samples=samples,
            num_samples=num,
            linear=np.stack([self.epsilon - y, -self.epsilon - y]),
            lower=np.stack([nothing, -cost]),
            upper=np.stack([cost, nothing]),
            start=start,
        )
        self._keep_one(data, self._solve(data, problem))

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Predicted targets of the rows of X, shape (N,)."""
        return self._decisions(X)
