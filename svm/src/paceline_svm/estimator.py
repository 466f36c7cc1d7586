"""The common part of SVC, SVR and OneClassSVM: scikit-learn's estimator contract around the distributed solver."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from abc import abstractmethod
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted

from paceline.host.processes import available_bytes
from paceline_svm.communicator import Alone, Communicator
from paceline_svm.compiled import shown
from paceline_svm.kernels import Kernel, expand
from paceline_svm.placement import is_for_one, solve
from paceline_svm.problem import Problem, Progress, Solution, SolverSettings
from paceline_svm.sample_forms import (
    DenseSamples,
    GramSamples,
    Samples,
    SparseSamples,
    gather_samples,
    renumbered,
)
from paceline_svm.thread_pool import thread_pool
from paceline_svm.training_set import (
    Facts,
    Part,
    TrainingSet,
    agreed,
    check_alike,
    checksum,
    communicator_for,
    in_words,
    mean_of_features,
    variance,
)
from paceline_svm.validation import Validation, called

_CACHE_BYTES = 500e6
_MEMORY_RATIO = 0.5  # of the memory that is there, which the ranks' caches may grow to together
_OF_RANK_0 = ("verbose", "random_state")  # parameters that may differ: rank 0's count
_WIDE = 64  # features from which products cost more than exponentials


class KernelMachine(Validation):
    """An estimator whose model is a kernel expansion.

    Concrete classes set up their problems in `_solve_all` and predict from `_expansion`.
    """

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.pairwise = self.kernel == "precomputed"
        tags.input_tags.sparse = self.kernel != "precomputed" and not callable(self.kernel)
        return tags

    # -- fit

    def _fit(self, X: Any, y: Any, sample_weight: Any) -> None:
        """Check, number the samples over all ranks, solve, and keep the model.

        Collective: one exchange of facts and one of what every sample is, before the solver's own.
        """
        communicator = communicator_for(self.rows if isinstance(self.rows, str) else "own")
        part, known = self._introduced(communicator, X, y, sample_weight)
        if self._is_for_one(part, communicator):
            if communicator.rounds_alike:
                known = [known[communicator.rank]]
                communicator = Alone()
            else:
                part, known = self._introduced(communicator, X, y, sample_weight, self._dealt(communicator))
        targets = self._encoded(part, known)
        self._check_facts(known)
        num_rows = known[0].num_rows if self.rows == "all" else sum(one.num_rows for one in known)
        first = 0 if self.rows == "all" else sum(one.num_rows for one in known[: communicator.rank])
        part = dataclasses.replace(part, samples=renumbered(part.samples, part.samples.ids + first))
        self.shape_fit_ = (num_rows, self.n_features_in_)
        self._sparse = sp.issparse(part.X)
        self._gamma = self._resolved_gamma(known)
        self._kernel = Kernel(self._kernel_name(), self._gamma, float(self.coef0), float(self.degree))
        self._check_kernel(max(one.largest_square for one in known))
        matrix = self._what_the_kernel_sees(communicator, part.samples, known, num_rows)
        most_samples = max(one.num_samples for one in known)
        data = TrainingSet.gathered(communicator, part, matrix, targets, num_rows, most_samples)
        self._check_all(data)
        with thread_pool(), shown(always=bool(self.verbose) and not callable(self.verbose)):
            self._solve_all(data, matrix)

    def _introduced(
        self, communicator: Communicator, X: Any, y: Any, sample_weight: Any, dealt: slice | None = None
    ) -> tuple[Part, list[Facts]]:
        """Return this rank's part of the rows, and the facts of all ranks, which fit. Collective; as `_told`."""
        part, told = agreed(
            communicator.introduce, lambda: self._told(communicator, X, y, sample_weight, dealt)
        )
        known = [Facts(*one) for one in told]
        check_alike([one.alike for one in known])
        return part, known

    def _told(
        self, communicator: Communicator, X: Any, y: Any, sample_weight: Any, dealt: slice | None = None
    ) -> tuple[Part, Facts]:
        """Return this rank's part of the rows it was passed, checked, and the facts that others have to know.

        Args:
            communicator: The ranks.
            X: Rows.
            y: Targets.
            sample_weight: Or None.
            dealt: Which rows are this rank's; None: as `rows` says, and all if one rank will do.
        """
        X, y, weights = self._checked(X, y, sample_weight)
        if dealt is None:
            is_shared = self.rows == "all" and not self._needs_one(X, y)
            dealt = self._dealt(communicator) if is_shared else slice(None)
        part = Part.of(X, y, weights, dealt)
        facts = Facts.of(
            part,
            self._alike(X, y, weights) if communicator.num_ranks > 1 else {},
            self._labels(y),
            with_moments=self.gamma == "scale" and self._kernel_name() != "precomputed",
            with_sums=self._is_centred(part.samples),
        )
        return part, facts

    @staticmethod
    def _dealt(communicator: Communicator) -> slice:
        """Return the rows that this rank gets of those that all ranks have."""
        return slice(communicator.rank, None, communicator.num_ranks)

    def _is_for_one(self, part: Part, communicator: Communicator) -> bool:
        """Return whether every rank has the same rows, and there is nothing to share."""
        all_have_them = self.rows == "all" and communicator.num_ranks > 1
        return all_have_them and self._needs_one(part.X, part.passed_y)

    def _needs_one(self, X: Any, y: Any) -> bool:
        """Return whether one rank solves the problem of these rows faster than all together."""
        return not callable(self.kernel) and is_for_one(X)

    def _alike(self, X: Any, y: Any, weights: Any) -> dict[str, str]:
        """Return what has to be the same on every rank, in words: the settings, and of what kind the data are."""
        settings = {**self.get_params(deep=False), "shrinking": self._shrinking()}
        alike = {name: in_words(value) for name, value in settings.items() if name not in _OF_RANK_0}
        alike["the estimator"] = type(self).__name__
        alike["X"] = f"{'sparse' if sp.issparse(X) else 'dense'} {X.dtype} of {X.shape[1]} features"
        if getattr(self, "warm_start", False):
            last = checksum(self.support_, self._table) if hasattr(self, "_table") else "none"
            alike["the last fit"] = last
        if self.rows == "all":
            alike["the content of X, y and sample_weight"] = checksum(X, y, weights)
        return alike

    def _labels(self, y: Any) -> Any:
        """Return the facts about the targets that other ranks need."""
        return None

    def _encoded(self, part: Part, facts: list[Facts]) -> NDArray[np.float64]:
        """Return targets as numbers."""
        return np.asarray(part.y, np.float64)

    def _kernel_name(self) -> str:
        return "precomputed" if callable(self.kernel) else str(self.kernel)

    def _resolved_gamma(self, facts: list[Facts]) -> float:
        """Gamma as a number; `scale` takes the variance of all rows of all ranks."""
        if self._kernel_name() == "precomputed":
            return 0.0
        if self.gamma == "auto":
            return 1.0 / int(self.n_features_in_)
        if self.gamma != "scale":
            return float(self.gamma)
        found = variance([one.moments for one in (facts[:1] if self.rows == "all" else facts)], self._sparse)
        return 1.0 / (int(self.n_features_in_) * found) if found > 0 else 1.0

    def _is_centred(self, samples: Samples) -> bool:
        """Return whether the mean is taken from all rows.

        Distances do not change, and single precision loses least near the origin. Rows that are in single precision
        already would be rounded.
        """
        return self.kernel == "rbf" and isinstance(samples, DenseSamples) and samples.dtype == np.float64

    def _what_the_kernel_sees(
        self, communicator: Communicator, samples: Samples, facts: list[Facts], num_rows: int
    ) -> Samples:
        """Return this rank's samples in the form that suits the kernel. Collective for a callable one."""
        if callable(self.kernel):
            everyone = gather_samples(communicator, samples, "exchanging samples")
            values, _ = agreed(
                communicator.gather_objects, lambda: (called(self.kernel, samples, everyone), None)
            )
            gram = np.zeros((len(samples), num_rows))
            gram[:, everyone.ids] = values
            return GramSamples(samples.ids, gram)
        if self.kernel == "precomputed":
            return GramSamples(samples.ids, samples.rows)  # type: ignore[attr-defined]
        if self._is_centred(samples):
            mean = mean_of_features(facts).astype(samples.dtype)
            return DenseSamples.of(samples.rows - mean, samples.ids)  # type: ignore[attr-defined]
        return samples

    def _start(self, data: TrainingSet, shape: tuple[int, int]) -> NDArray[np.float64] | None:
        """Return the last fit's table over the rows of all ranks, if the fit starts from it. Otherwise None."""
        if (
            not getattr(self, "warm_start", False)
            or getattr(self, "_table", np.empty((0, 0))).shape[0] != shape[0]
        ):
            return None
        if self._num_rows != shape[1]:
            return None
        table = np.zeros(shape)
        table[:, self.support_] = self._table
        return table

    def _settings(self) -> SolverSettings:
        shrinking = self._shrinking()
        grows = self.cache_size == "auto" and shrinking == "none"  # with shrinking it takes longer
        return SolverSettings(
            tol=float(self.tol),
            max_steps=int(self.max_iter),
            cache_bytes=_CACHE_BYTES if self.cache_size == "auto" else float(self.cache_size) * 1e6,
            most_cache_bytes=_MEMORY_RATIO * available_bytes() if grows else 0.0,
            shrinking=shrinking,
            report=self.verbose if callable(self.verbose) else (_show if self.verbose else None),
        )

    def _solve(self, data: TrainingSet, problem: Problem) -> Solution:
        """Solve one problem of all ranks. Collective."""
        solution = solve(problem, self._settings(), data.communicator)
        self._warn(solution)
        return solution

    def _warn(self, solution: Solution) -> None:
        if not solution.converged:
            warnings.warn(
                f"Solver stopped after {solution.counters.num_steps} pair updates "
                f"(working sets: {solution.counters.num_exchanges}) with a violation of {solution.gap:.3g}, above "
                f"tol={self.tol:g}. Consider pre-processing your data with StandardScaler or MinMaxScaler, or a "
                "larger max_iter.",
                ConvergenceWarning,
                stacklevel=6,
            )

    @abstractmethod
    def _solve_all(self, data: TrainingSet, matrix: Samples) -> None:
        """Solve what there is to solve, and call `_keep`."""

    def _keep(
        self, data: TrainingSet, table: NDArray[np.float64], offsets: list[float], solutions: list[Solution]
    ) -> NDArray[np.int64]:
        """Keep the model: every rank gets all support vectors.

        Args:
            data: The training set.
            table: Coefficients of this rank's samples, shape (R, N).
            offsets: Of every problem.
            solutions: Of every problem.

        Returns:
            Numbers of the support vectors among `data.all_ids`, ascending.
        """
        local = np.flatnonzero(table.any(axis=0))
        columns = data.everywhere(
            DenseSamples.of(np.ascontiguousarray(table[:, local].T), data.samples.ids[local]),
            np.arange(len(local)),
        )
        self._table = np.ascontiguousarray(columns.rows.T)  # type: ignore[attr-defined]
        self._offsets = np.array(offsets)
        self.support_ = columns.ids.astype(np.int32)
        self.support_vectors_ = (
            np.empty((0, 0))  # a Gram matrix has no rows of features
            if self.kernel == "precomputed"
            else data.everywhere(data.samples, local).rows  # type: ignore[attr-defined]
        )
        self._num_rows = data.num_rows
        self.fit_status_ = int(not all(solution.converged for solution in solutions))
        self.counters_ = tuple(solution.counters for solution in solutions)
        self._objectives = [(solution.objective, solution.linear_part) for solution in solutions]
        return np.searchsorted(data.all_ids, columns.ids)

    def _keep_one(self, data: TrainingSet, solution: Solution) -> None:
        """Keep the model of a single problem over all samples."""
        self._keep(data, solution.beta[None], [solution.offset], [solution])
        self.dual_coef_ = self._table
        self.intercept_ = -self._offsets
        self.n_support_ = np.array([len(self.support_)], np.int32)
        self.n_iter_: Any = solution.counters.num_steps
        self.gap_: Any = solution.gap

    @property
    def objective_(self) -> Any:
        """Dual objective (to be minimised), in double precision.

        After a fit whose kernel rows were in single precision it is computed when first asked for. That needs the
        kernel values of all support vectors with each other, so it may take a part of the time of the fit.
        """
        if not hasattr(self, "_objectives"):
            raise AttributeError(f"{type(self).__name__} is not fitted yet, so it has no objective_")
        for k, (_, linear_part) in enumerate(self._objectives):
            if linear_part is not None:
                self._objectives[k] = 0.5 * self._squared_length(k) + linear_part, None
        return self._shown([objective for objective, _ in self._objectives])

    def _shown(self, objectives: list[float]) -> Any:
        """Return objectives of all problems in the form of the attribute."""
        return objectives[0]

    def _coefficients_of(self, problem: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the support vectors of a problem, and their coefficients."""
        return np.arange(len(self.support_)), self._table[0]

    def _squared_length(self, problem: int) -> float:
        """Return the quadratic part, b'Kb, of a problem, in double precision."""
        members, beta = self._coefficients_of(problem)
        support = self._sampled(self.support_vectors_[members]).astype(np.float64)
        with thread_pool():
            sums = expand(self._kernel, support, beta[None], support)
        return float(sums[0] @ beta)

    # -- predict

    def _expansion(self, X: Any, support: slice) -> NDArray[np.float64]:
        """Return sums of kernel values of some support vectors by each row of their table, shape (N, R).

        Args:
            X: Rows that `_seen_rows` returned.
            support: Which support vectors.
        """
        table = self._table[:, support]
        if callable(self.kernel):
            return np.asarray(self.kernel(X, self.support_vectors_[support]) @ table.T, np.float64)
        if self.kernel == "precomputed":
            return np.asarray(X[:, self.support_[support]] @ table.T, np.float64)
        behind, rows = self._sampled(self.support_vectors_[support]), self._sampled(X)
        dtype = self._precision(behind.squares, table)
        with thread_pool(), shown():
            sums = expand(self._kernel, behind.astype(dtype), table, rows.astype(dtype))
        return np.asarray(sums.T)

    def _kernel_values(self, X: Any) -> NDArray[np.float64]:
        """Return kernel values of support vectors with some rows, in double precision, shape (support vectors, N)."""
        if self.kernel == "precomputed":
            return np.asarray(X[:, self.support_].T, np.float64)
        behind, rows = self._sampled(self.support_vectors_), self._sampled(X)
        return self._kernel.values(behind.astype(np.float64), rows.astype(np.float64))

    def _sampled(self, rows: Any) -> Any:
        form: Any = SparseSamples if self._sparse else DenseSamples
        return form.of(rows, np.arange(rows.shape[0]))

    def _precision(self, squares: NDArray[np.float64], table: NDArray[np.float64]) -> Any:
        """Single for the kernel values of a prediction, where that pays and errs by less than a tenth of `tol`.

        A kernel value errs by half an epsilon for each unit of its exponent's parts; errors add up as roots of squares.
        """
        if self._kernel.name != "rbf" or self.n_features_in_ < _WIDE:
            return np.float64
        exponent = 2 * self._kernel.gamma * float(squares.max(initial=0.0))
        error = (
            0.5 * np.finfo(np.float32).eps * (exponent + 4) * np.sqrt((table**2).sum(axis=1).max(initial=0.0))
        )
        return np.float32 if error <= 0.1 * self.tol else np.float64

    def _decisions(self, X: Any) -> NDArray[np.float64]:
        """Return values of the only problem, shape (N,)."""
        return np.asarray(self._expansion(self._seen_rows(X), slice(None))[:, 0] - self._offsets[0])

    @property
    def coef_(self) -> Any:
        """Return the weights of the features. Only a linear kernel has them."""
        if self.kernel != "linear":
            raise AttributeError("coef_ is only available when using a linear kernel")
        check_is_fitted(self)
        return self._weights_of_features()

    def _weights_of_features(self) -> Any:
        return self._signed(self.dual_coef_) @ self.support_vectors_

    def _signed(self, dual: NDArray[np.float64]) -> Any:
        return sp.csr_matrix(dual) if self._sparse else dual


def _show(progress: Progress) -> None:
    """Print a line, for verbose=True."""
    print(  # noqa: T201 - verbose=True asks for it
        f"working set {progress.num_exchanges}: violation {progress.gap:.3g}, {progress.num_active} active samples, "
        f"{progress.num_support} support vectors, {progress.num_steps} pair updates, {progress.elapsed_s:.1f} s",
        file=sys.stderr,
    )
