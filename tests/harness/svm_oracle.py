"""The expected answer of a support vector machine, computed from scratch in double precision."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics.pairwise import pairwise_kernels

from paceline_svm import placement, working_set

TIGHT = 1e-6


@dataclass(frozen=True)
class Truth:
    """The quality of a binary classifier's coefficients: objective, largest violation, violation of the equality."""

    objective: float
    gap: float
    imbalance: float


def two_classes(
    num: int, num_features: int = 4, seed: int = 0, noise: float = 0.3
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return overlapping classes with a curved border; labels 0 and 1."""
    generator = np.random.default_rng(seed)
    X = generator.normal(size=(num, num_features))
    y = (np.sin(2 * X[:, 0]) + X[:, 1] + noise * generator.normal(size=num) > 0).astype(int)
    return X, y


def truth(X: Any, y: Any, model: Any, costs: Any, **kernel: Any) -> Truth:
    """Return the quality of a fitted binary SVC, of Paceline or scikit-learn."""
    signs = np.where(y == model.classes_[1], 1.0, -1.0)
    beta = np.zeros(len(y))
    dual = model.dual_coef_
    beta[model.support_] = np.asarray(dual.todense() if hasattr(dual, "todense") else dual).ravel()
    K = pairwise_kernels(X.astype(np.float64), metric=kernel.pop("kernel", "rbf"), **kernel)
    f = K @ beta - signs
    lower, upper = np.minimum(0, signs * costs), np.maximum(0, signs * costs)
    slack = 1e-9 * np.max(upper - lower)
    assert np.all(beta >= lower - slack)
    assert np.all(beta <= upper + slack)
    may_grow, may_shrink = beta < upper - slack, beta > lower + slack
    return Truth(
        objective=0.5 * beta @ K @ beta - signs @ beta,
        gap=max(0.0, f[may_shrink].max() - f[may_grow].min()),
        imbalance=abs(beta.sum()),
    )


@contextlib.contextmanager
def working_sets_of(size: int) -> Iterator[None]:
    """Make working sets so small that every problem needs many, and solve none as a whole."""
    with (
        mock.patch.object(placement, "LARGEST", 0),
        mock.patch.object(placement, "_LEAST_ROW_S", 0.0),
        mock.patch.object(working_set, "working_set_size", lambda num, _=0: min(size, max(2, num))),
    ):
        yield
