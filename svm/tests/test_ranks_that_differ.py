"""Ranks with other settings or other data are refused before the fit, on all ranks, with what both have."""

from __future__ import annotations

import threading
from unittest import mock

import numpy as np
import pytest
import scipy.sparse as sp

from harness.svm_oracle import two_classes
from paceline.errors import ConfigurationError
from paceline_lab.doubles.in_process import InProcessWorld
from paceline_svm import SVC, SVR, OneClassSVM, communicator, estimator

pytestmark = pytest.mark.compiles

ESTIMATORS = (SVC, SVR, OneClassSVM)
OTHER = {
    "C": 3.0,
    "kernel": "linear",
    "degree": 5,
    "gamma": 0.25,
    "coef0": 0.5,
    "shrinking": False,
    "tol": 1e-2,
    "cache_size": 100,
    "class_weight": {0: 2, 1: 1},
    "max_iter": 7,
    "decision_function_shape": "ovo",
    "break_ties": True,
    "probability": True,
    "warm_start": True,
    "rows": "all",
    "epsilon": 0.2,
    "nu": 0.25,
}
MAY_DIFFER = {"verbose", "random_state"}


def refusals(fit_of_rank):
    """Each rank's error; ranks are threads. The functions take (X, y), which are the same on both."""
    here = threading.local()

    def task(group):
        here.communicator = communicator.GroupCommunicator(group)
        with pytest.raises(ConfigurationError, match="cannot fit one model") as caught:
            fit_of_rank[group.rank()](*two_classes(40, 3))
        return str(caught.value)

    def communicator_here(_rows):
        return here.communicator

    with mock.patch.object(estimator, "communicator_for", communicator_here):
        return InProcessWorld(len(fit_of_rank)).run(task)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_any_other_setting_is_refused(kind):
    """Every parameter of the estimator, except those of which rank 0's count."""
    names = set(kind().get_params()) - MAY_DIFFER
    for name in sorted(names):
        first, second = refusals([kind().fit, kind(**{name: OTHER[name]}).fit])
        assert first == second
        assert first.startswith(f"ranks 0 and 1 cannot fit one model: {name}: "), name
        assert " on rank 0, " in first
        assert " on rank 1" in first


def test_the_same_settings_in_other_words_are_the_same():
    """Numbers of numpy, mappings in another order, functions of one name: then the third setting is what is refused."""
    one = {"C": 2, "class_weight": {0: 1, 1: 2.0}, "shrinking": True, "kernel": lambda a, b: a @ b.T}
    other = {
        "C": np.float32(2),
        "class_weight": {1: np.int64(2), 0: 1.0},
        "shrinking": "auto",
        "kernel": one["kernel"],
    }
    first, _ = refusals([SVC(**one, tol=0.1, verbose=True).fit, SVC(**other, tol=0.2, random_state=1).fit])
    assert first.startswith("ranks 0 and 1 cannot fit one model: tol: 0.1 on rank 0, 0.2 on rank 1. Pass")


KINDS_OF_DATA = {
    "y: int8 on rank 0, int64": (lambda X, y: (X, y.astype(np.int8)), lambda X, y: (X, y * 300)),
    "y: text on rank 0, int64": (lambda X, y: (X, np.array(["a", "b"])[y]), lambda X, y: (X, y)),
    "y: text on rank 0, object": (
        lambda X, y: (X, np.array(["a", "b"])[y]),
        lambda X, y: (X, np.array(["b", "ccc"], object)[y]),
    ),
    "y: bool on rank 0, int64": (lambda X, y: (X, y == 1), lambda X, y: (X, y)),
    "X: sparse float64 of 3 features on rank 0, dense": (
        lambda X, y: (sp.csr_matrix(X), y),
        lambda X, y: (X, y),
    ),
    "X: dense float32 of 3 features on rank 0": (
        lambda X, y: (X.astype(np.float32), y),
        lambda X, y: (X, y),
    ),
    "X: dense float64 of 3 features on rank 0, dense float64 of 2": (
        lambda X, y: (X, y),
        lambda X, y: (X[:, :2], y),
    ),
}


@pytest.mark.parametrize("words", KINDS_OF_DATA)
def test_data_of_another_kind_are_refused(words):
    fits = [
        lambda X, y, make=make: SVC().fit(*make(X, (y > 0).astype(np.int64))) for make in KINDS_OF_DATA[words]
    ]
    first, second = refusals(fits)
    assert first == second
    assert first.startswith(f"ranks 0 and 1 cannot fit one model: {words}")


def test_other_estimators_are_refused():
    first, second = refusals([SVR().fit, OneClassSVM().fit])
    assert first == second
    assert "epsilon: 0.1 on rank 0, none on rank 1" in first


def test_rows_that_all_ranks_have_are_the_same_rows():
    """Otherwise each rank fits its own small problem, and models differ."""
    for change in (
        lambda X, y: (X + (X[3, 1] == X), y, None),
        lambda X, y: (X, np.roll(y, 1), None),
        lambda X, y: (X, y, np.where(X[:, 0] > 0, 2.0, 1.0)),
        lambda X, y: (sp.csr_matrix(X + (X[3, 1] == X)), y, None),
    ):
        is_sparse = sp.issparse(change(*two_classes(40, 3))[0])
        first, _ = refusals(
            [
                lambda X, y, is_sparse=is_sparse: SVC(rows="all").fit(
                    sp.csr_matrix(X) if is_sparse else X, y
                ),
                lambda X, y, change=change: SVC(rows="all").fit(*change(X, y)),
            ]
        )
        assert "the content of X, y and sample_weight: checksum" in first


def test_a_warm_start_begins_from_one_fit():
    X, y = two_classes(40, 3)
    models = [SVC(warm_start=True, rows="alone", gamma=gamma).fit(X, y) for gamma in (0.5, 2.0)]
    first, second = refusals([model.set_params(rows="own", gamma=0.5).fit for model in models])
    assert first == second
    assert first.startswith("ranks 0 and 1 cannot fit one model: the last fit: checksum")
