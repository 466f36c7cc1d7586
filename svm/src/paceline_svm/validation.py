"""Validation of parameters, data and callable kernels, with scikit-learn's messages."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_array, check_is_fitted, validate_data

from paceline.errors import ConfigurationError
from paceline_svm.kernels import Kernel
from paceline_svm.shrinking import Heuristic
from paceline_svm.training_set import ROWS, Facts, TrainingSet

KERNELS = ("linear", "poly", "rbf", "sigmoid", "precomputed")
_DTYPES = (np.float64, np.float32)
_LARGEST_VALUE = 1e300  # of a kernel: sums of a few are finite


class Validation(BaseEstimator):  # type: ignore[misc]
    """The part of an estimator that validates its parameters and what it is given."""

    _sparse: bool
    _kernel: Kernel

    def _check_parameters(self) -> None:
        """Refuse invalid parameters, in scikit-learn's words."""
        if not callable(self.kernel) and self.kernel not in KERNELS:
            self._refuse("kernel", f"a str among {KERNELS} or a callable")
        if isinstance(self.gamma, str):
            if self.gamma not in ("scale", "auto"):
                self._refuse("gamma", "a str among ('auto', 'scale') or a float in the range [0.0, inf)")
        else:
            self._check_number("gamma", 0.0)
        self._check_number("tol", 0.0, is_open=True)
        if self.cache_size != "auto":
            self._check_number("cache_size", 0.0, is_open=True)
        # Others have no powers of negative numbers.
        if not isinstance(self.degree, numbers.Real) or self.degree < 0 or self.degree % 1:
            self._refuse("degree", "a whole number in the range [0, inf)")
        self._check_number("coef0", -np.inf)
        if not isinstance(self.max_iter, numbers.Integral) or self.max_iter < -1:
            self._refuse("max_iter", "an int in the range [-1, inf)")
        if not isinstance(self.shrinking, (bool, np.bool_, str)):
            self._refuse("shrinking", "a bool or the name of a heuristic")
        Heuristic.named(self._shrinking())
        if not isinstance(self.verbose, numbers.Integral) and not callable(self.verbose):
            self._refuse("verbose", "a bool, an int or a function that takes a Progress")
        if not isinstance(getattr(self, "warm_start", False), (bool, np.bool_)):
            self._refuse("warm_start", "a bool")
        if self.rows not in ROWS:
            self._refuse("rows", f"a str among {ROWS}")

    def _shrinking(self) -> str:
        """Return the name of the heuristic."""
        if isinstance(self.shrinking, str):
            return self.shrinking
        return "auto" if self.shrinking else "none"

    def _check_number(
        self, name: str, least: float, largest: float | None = None, *, is_open: bool = False
    ) -> None:
        """Refuse what is not a number from `least` to `largest`, if there is one; infinity only where that is it.

        Args:
            name: Of the parameter.
            least: As above.
            largest: As above.
            is_open: Whether `least` itself is refused.
        """
        value, end = getattr(self, name), "inf)" if largest is None else f"{largest}]"
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        most = np.finfo(np.float64).max if largest is None else largest
        if not is_number or not least <= value <= most or value == -np.inf or (is_open and value == least):
            begin = "(" if is_open or least == -np.inf else "["
            self._refuse(name, f"a number in the range {begin}{least}, {end}")

    def _refuse(self, name: str, wanted: str) -> None:
        raise ConfigurationError(
            f"The {name!r} parameter of {type(self).__name__} must be {wanted}. "
            f"Got {getattr(self, name)!r} instead."
        )

    def _checked(self, X: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
        self._check_parameters()
        sparse = self.kernel != "precomputed" and not callable(self.kernel)
        if sp.issparse(X) and self.kernel == "precomputed":
            raise TypeError("Sparse precomputed kernels are not supported.")
        settings: dict[str, Any] = {
            "dtype": _DTYPES,
            "order": "C",
            "accept_sparse": "csr" if sparse else False,
        }
        if y is None and not self._needs_targets:
            X = validate_data(self, X, **settings)
            y = np.ones(X.shape[0])
        else:
            X, y = validate_data(self, X, y, multi_output=False, **settings)
        targets = self._checked_targets(y)
        if self.kernel == "precomputed" and self.rows != "own" and X.shape[0] != X.shape[1]:
            raise ConfigurationError(
                f"Precomputed matrix must be a square matrix. Input is a {X.shape[0]}x{X.shape[1]} matrix."
            )
        if sample_weight is not None:
            sample_weight = check_array(
                sample_weight, ensure_2d=False, dtype=np.float64, input_name="sample_weight"
            )
            if sample_weight.shape != (X.shape[0],):
                raise ConfigurationError(
                    f"sample_weight and X have incompatible shapes: {sample_weight.shape} vs {X.shape}"
                )
        return X, targets, sample_weight

    _needs_targets = True

    def _checked_targets(self, y: Any) -> Any:
        return np.asarray(y, np.float64)

    def _check_facts(self, facts: list[Facts]) -> None:
        """Refuse training sets that cannot be fitted, once all ranks' facts are known; alike on every rank."""
        if sum(one.num_samples for one in facts) == 0:
            raise ConfigurationError("Invalid input - all samples have zero or negative weights.")
        if not np.isfinite(sum(one.squares for one in facts)):
            raise ConfigurationError(
                "Input X has values so large that their squares overflow. Scale the features first, with "
                "StandardScaler or MinMaxScaler."
            )
        num_rows = facts[0].num_rows if self.rows == "all" else sum(one.num_rows for one in facts)
        if self.kernel == "precomputed" and num_rows != self.n_features_in_:
            raise ConfigurationError(
                f"Precomputed matrix must be a square matrix. Input is a {num_rows}x{self.n_features_in_} matrix."
            )

    def _check_all(self, data: TrainingSet) -> None:
        """Refuse training sets that cannot be fitted, once all ranks' samples are known; alike on every rank."""

    def _check_kernel(self, largest_square: float) -> None:
        """Refuse kernel values that may overflow, alike on every rank.

        Args:
            largest_square: Squared length of all ranks' samples.
        """
        kernel = self._kernel
        if kernel.name in ("linear", "precomputed"):
            return
        with np.errstate(over="ignore"):
            largest = np.float64(kernel.gamma) * largest_square
            if kernel.name != "rbf":
                largest += abs(kernel.coef0)
            if kernel.name == "poly":
                largest = largest**kernel.degree
        if not largest < _LARGEST_VALUE:
            numbers_given = f"gamma={kernel.gamma:g}, coef0={kernel.coef0:g} and degree={kernel.degree:g}"
            raise ConfigurationError(
                f"Values of the {kernel.name!r} kernel may overflow with {numbers_given}. Scale the features, with "
                "StandardScaler or MinMaxScaler, or take smaller ones."
            )

    def _seen_rows(self, X: Any) -> Any:
        """Return rows to predict, validated."""
        check_is_fitted(self)
        accept = "csr" if self.kernel != "precomputed" and not callable(self.kernel) else False
        X = validate_data(self, X, dtype=_DTYPES, order="C", accept_sparse=accept, reset=False)
        if sp.issparse(X) and not self._sparse:
            raise ConfigurationError(
                f"cannot use sparse input in {type(self).__name__!r} trained on dense data"
            )
        return sp.csr_matrix(X) if self._sparse and not sp.issparse(X) else X


def called(kernel: Any, left: Any, right: Any) -> NDArray[np.float64]:
    """Return values of a callable kernel between two sets of dense samples, checked for shape and finiteness."""
    values = np.asarray(kernel(left.rows, right.rows), np.float64)
    wanted = len(left), len(right)
    if values.shape != wanted:
        raise ConfigurationError(
            f"The kernel function returned shape {values.shape} for {wanted[0]} and {wanted[1]} rows. It must "
            f"return {wanted}: a value for each pair of rows."
        )
    if not np.isfinite(values).all():
        raise ConfigurationError(
            f"The kernel function returned NaN or infinity for {wanted[0]} and {wanted[1]} rows. All of its values "
            "must be finite."
        )
    return values
