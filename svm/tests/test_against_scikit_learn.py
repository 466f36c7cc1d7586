"""The three estimators give scikit-learn's answers: objective, decision function, attributes."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn import svm as theirs
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics.pairwise import pairwise_kernels
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import paceline_svm as ours
from harness.svm_oracle import TIGHT, truth, two_classes

pytestmark = pytest.mark.compiles


def expected_failures(_estimator):
    """As scikit-learn's own: gamma="scale" does not weigh the rows."""
    return {
        f"check_sample_weight_equivalence_on_{form}_data": "gamma='scale' counts rows, not weights"
        for form in ("dense", "sparse")
    }


@parametrize_with_checks(
    [ours.SVC(), ours.SVR(), ours.OneClassSVM()], expected_failed_checks=expected_failures
)
@pytest.mark.filterwarnings("ignore")  # the checks provoke them
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("C", [0.01, 1.0, 100.0])
@pytest.mark.parametrize(
    "kernel",
    [
        {"kernel": "rbf", "gamma": 0.5},
        {"kernel": "linear"},
        {"kernel": "poly", "gamma": 0.3, "coef0": 1.0, "degree": 3},
    ],
    ids=lambda kernel: kernel["kernel"],
)
def test_the_objective_is_libsvms(kernel, C, dtype):
    X, y = two_classes(300)
    X = X.astype(dtype)
    mine, other = ours.SVC(C=C, tol=TIGHT, **kernel).fit(X, y), theirs.SVC(C=C, tol=TIGHT, **kernel).fit(X, y)
    one, two = truth(X, y, mine, C, **kernel), truth(X, y, other, C, **kernel)
    assert one.gap <= 1.01 * TIGHT
    assert mine.gap_[0] == pytest.approx(one.gap, abs=1e-7)
    assert one.objective == pytest.approx(two.objective, rel=1e-6)
    assert mine.objective_[0] == pytest.approx(one.objective, rel=1e-6)
    # A gap of tol leaves the primal weights undetermined by about sqrt(tol * C * samples).
    assert np.allclose(mine.decision_function(X), other.decision_function(X), atol=1e-4 * max(1, C))


def test_single_precision_rows_reach_the_optimum():
    """The default tolerance uses float32 kernel rows; the gap is nevertheless true in float64."""
    X, y = two_classes(3000, 8)
    mine = ours.SVC(C=10, gamma=0.2).fit(X, y)
    true = truth(X, y, mine, 10, gamma=0.2)
    best = truth(X, y, theirs.SVC(C=10, gamma=0.2, tol=1e-5).fit(X, y), 10, gamma=0.2)
    assert true.gap <= 1e-3 * (1 + 1e-6)
    assert mine.gap_[0] == pytest.approx(true.gap, abs=1e-9)
    assert true.objective == pytest.approx(best.objective, rel=1e-6)
    assert true.imbalance < 1e-9
    assert mine.objective_[0] == pytest.approx(true.objective, rel=1e-12)


def test_the_objective_after_single_precision_rows_is_in_double():
    """Of several pairs of classes, some solved as a whole; of regression, dense and sparse."""
    X, y = two_classes(3600, 4, noise=0.5)
    y[:200] = 2
    many = ours.SVC(C=5.0, gamma=0.5).fit(X, y)
    for k, pair in enumerate(itertools.combinations(range(3), 2)):
        part = np.isin(y, pair)
        alone = ours.SVC(C=5.0, gamma=0.5).fit(X[part], y[part])
        true = truth(X[part], y[part], alone, 5.0, gamma=0.5).objective
        assert alone.objective_[0] == pytest.approx(true, rel=1e-12)
        assert many.objective_[k] == pytest.approx(true, rel=1e-6)
    z, X = X[:1700, 1] + np.sin(X[:1700, 0]), X[:1700]
    for rows in (X, sp.csr_matrix(X)):
        model = ours.SVR(C=2.0, gamma=0.5).fit(rows, z)
        beta = np.zeros(len(z))
        beta[model.support_] = model.dual_coef_[0]
        K = pairwise_kernels(X, metric="rbf", gamma=0.5)
        true = 0.5 * beta @ K @ beta - z @ beta + 0.1 * np.abs(beta).sum()
        assert model.objective_ == pytest.approx(true, rel=1e-12)


@pytest.mark.parametrize("form", [np.asarray, sp.csr_matrix, sp.csr_array], ids=["dense", "matrix", "array"])
@pytest.mark.parametrize("kernel", ["rbf", "linear"])
def test_many_classes(form, kernel):
    X, y = load_digits(return_X_y=True)
    X, names = form(X / 16), np.array([f"digit {i}" for i in range(10)])[y]
    settings = {"kernel": kernel, "tol": 1e-5, "gamma": 0.1, "decision_function_shape": "ovo"}
    mine, other = ours.SVC(**settings).fit(X, names), theirs.SVC(**settings).fit(X, names)
    for name in ("classes_", "support_", "n_support_", "intercept_", "dual_coef_", "class_weight_"):
        assert getattr(mine, name).shape == getattr(other, name).shape, name
    assert np.array_equal(mine.n_support_, other.n_support_)
    assert np.allclose(mine.decision_function(X), other.decision_function(X), atol=1e-3)
    assert np.array_equal(mine.predict(X), other.predict(X))
    assert np.abs(mine.intercept_ - other.intercept_).max() < 1e-3
    by_sample, by_theirs = np.zeros((9, len(y))), np.zeros((9, len(y)))
    by_sample[:, mine.support_] = mine.dual_coef_
    dual = other.dual_coef_
    by_theirs[:, other.support_] = dual.toarray() if sp.issparse(dual) else dual
    assert np.abs(by_sample - by_theirs).max() < 0.05
    assert len(mine.gap_) == 45
    assert mine.gap_.max() <= 1e-5
    mine.decision_function_shape = other.decision_function_shape = "ovr"
    assert mine.decision_function(X).shape == (len(y), 10)
    assert (
        np.mean(mine.decision_function(X).argmax(axis=1) == other.decision_function(X).argmax(axis=1)) > 0.999
    )


def test_predictions_in_single_precision_err_by_less_than_a_tenth_of_tol():
    """Only where rows are wide and the coefficients allow it; else kernel values are in double precision."""
    X, y = load_digits(return_X_y=True)
    X, y = X / 16, y % 2
    for C, dtype in ((1.0, np.float32), (1e4, np.float64)):
        model = ours.SVC(C=C, gamma=0.02 if C == 1.0 else 2.0, tol=1e-3).fit(X, y)
        assert model._precision((model.support_vectors_**2).sum(axis=1), model._table) == dtype
        K = pairwise_kernels(X, model.support_vectors_, metric="rbf", gamma=model._gamma)
        exact = K @ model.dual_coef_[0] + model.intercept_[0]
        error = np.abs(model.decision_function(X) - exact).max()
        assert error < 1e-4
        assert (error > 1e-9) == (dtype == np.float32)


def test_weights():
    """Class and sample weights scale C; samples without weight take no part."""
    X, y = two_classes(400)
    weights = np.random.default_rng(1).choice([0.0, 0.5, 1.0, 3.0], size=400)
    for class_weight in (None, "balanced", {0: 2.0, 1: 0.3}):
        settings = {"class_weight": class_weight, "tol": TIGHT}
        mine = ours.SVC(**settings).fit(X, y, weights)
        other = theirs.SVC(**settings).fit(X, y, weights)
        assert np.allclose(mine.decision_function(X), other.decision_function(X), atol=1e-4)
        assert np.all(weights[mine.support_] > 0)
        assert np.array_equal(mine.n_support_, other.n_support_)


@pytest.mark.parametrize("kernel", ["rbf", "linear"])
def test_regression(kernel):
    X, y = load_diabetes(return_X_y=True)
    weights = np.random.default_rng(2).choice([0.0, 1.0, 2.0], size=len(y))
    settings = {"kernel": kernel, "C": 50.0, "epsilon": 5.0, "tol": 1e-4}
    mine, other = ours.SVR(**settings).fit(X, y, weights), theirs.SVR(**settings).fit(X, y, weights)
    assert np.allclose(mine.predict(X), other.predict(X), atol=1e-2)
    assert mine.gap_ <= 1e-4
    for name in ("dual_coef_", "intercept_", "n_support_", "support_"):
        assert getattr(mine, name).shape == getattr(other, name).shape, name
    if kernel == "linear":
        assert np.allclose(mine.coef_, other.coef_, atol=1e-2)


def test_novelty_detection():
    X, _ = load_breast_cancer(return_X_y=True)
    X = StandardScaler().fit_transform(X)
    weights = np.random.default_rng(3).choice([0.0, 0.5, 1.0], size=len(X))
    settings = {"nu": 0.2, "gamma": 0.05, "tol": 1e-6}
    mine = ours.OneClassSVM(**settings).fit(X, sample_weight=weights)
    other = theirs.OneClassSVM(**settings).fit(X, sample_weight=weights)
    assert np.allclose(mine.decision_function(X), other.decision_function(X), atol=1e-5)
    assert np.allclose(mine.score_samples(X), other.score_samples(X), atol=1e-5)
    assert mine.offset_ == pytest.approx(other.offset_, abs=1e-5)
    far = np.abs(other.decision_function(X)) > 1e-4
    assert np.array_equal(mine.predict(X)[far], other.predict(X)[far])


def test_precomputed_and_callable_kernels():
    X, y = load_iris(return_X_y=True)
    expected = theirs.SVC(kernel="linear", tol=1e-5).fit(X, y).decision_function(X)
    gram = ours.SVC(kernel="precomputed", tol=1e-5).fit(X @ X.T, y)
    called = ours.SVC(kernel=lambda a, b: a @ b.T, tol=1e-5).fit(X, y)
    assert np.allclose(gram.decision_function(X @ X.T), expected, atol=1e-3)
    assert np.allclose(called.decision_function(X), expected, atol=1e-3)
    with pytest.raises(ValueError, match="must be a square matrix"):
        ours.SVC(kernel="precomputed").fit(X, y)


def test_in_a_pipeline_a_search_and_a_pickle():
    X, y = load_breast_cancer(return_X_y=True)
    search = GridSearchCV(make_pipeline(StandardScaler(), ours.SVC()), {"svc__C": [0.1, 1.0]}, cv=3).fit(X, y)
    assert search.best_score_ > 0.95
    again = pickle.loads(pickle.dumps(search.best_estimator_))
    assert np.array_equal(again.predict(X), search.predict(X))
    assert clone(search.best_estimator_[-1]).get_params()["C"] == search.best_params_["svc__C"]


def test_max_iter_counts_pair_updates_and_says_so():
    X, y = two_classes(500)
    with pytest.warns(
        ConvergenceWarning,
        match=r"Solver stopped after 7 pair updates \(working sets: 1\) with a violation of",
    ):
        model = ours.SVC(max_iter=7).fit(X, y)
    assert model.n_iter_[0] == 7
    assert model.fit_status_ == 1
    assert model.gap_[0] == pytest.approx(truth(X, y, model, 1.0, gamma=model._gamma).gap, abs=1e-9)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"C": -1}, "The 'C' parameter of SVC must be"),
        ({"kernel": "rfb"}, "The 'kernel' parameter of SVC must be"),
        ({"gamma": "large"}, "The 'gamma' parameter of SVC must be"),
        ({"tol": 0.0}, "The 'tol' parameter of SVC must be"),
        ({"rows": "some"}, "The 'rows' parameter of SVC must be"),
        ({"shrinking": "sometimes"}, "no shrinking heuristic 'sometimes'"),
        ({"shrinking": "multi-0"}, "no shrinking heuristic 'multi-0'"),
        ({"decision_function_shape": "one"}, "The 'decision_function_shape' parameter"),
        ({"warm_start": "yes"}, "The 'warm_start' parameter of SVC must be a bool"),
        ({"verbose": "yes"}, "The 'verbose' parameter of SVC must be"),
        ({"shrinking": 1}, "The 'shrinking' parameter of SVC must be a bool or the name of a heuristic"),
        ({"max_iter": 1.5}, "The 'max_iter' parameter of SVC must be an int"),
        ({"degree": 2.5}, "The 'degree' parameter of SVC must be a whole number"),
        ({"gamma": np.inf}, r"The 'gamma' parameter of SVC must be a number in the range \[0.0, inf\)"),
        ({"coef0": -np.inf}, r"The 'coef0' parameter of SVC must be a number in the range \(-inf, inf\)"),
        ({"gamma": 1e308}, "Values of the 'rbf' kernel may overflow with gamma=1e"),
        ({"kernel": "poly", "coef0": 1e103}, "Values of the 'poly' kernel may overflow"),
        ({"class_weight": {0: -1.0}}, "The 'class_weight' parameter of SVC must not be negative"),
        ({"kernel": lambda a, _: a}, r"returned shape \(20, 4\) for 20 and 20 rows"),
        ({"kernel": lambda a, b: np.full((len(a), len(b)), np.nan)}, "returned NaN or infinity"),
    ],
)
def test_parameters_that_cannot_be(settings, words):
    X, y = two_classes(20)
    with pytest.raises(ValueError, match=words):
        ours.SVC(**settings).fit(X, y)


def test_coef0_of_kernels_that_have_none_is_not_looked_at():
    X, y = two_classes(20)
    assert np.array_equal(ours.SVC(coef0=1e305).fit(X, y).dual_coef_, ours.SVC().fit(X, y).dual_coef_)


def test_data_that_cannot_be():
    X, y = two_classes(20)
    with pytest.raises(ValueError, match="number of classes has to be greater than one; got 1 class"):
        ours.SVC().fit(X, np.zeros(20))
    with pytest.raises(ValueError, match="Input X contains NaN"):
        ours.SVC().fit(np.where(X > 1, np.nan, X), y)
    with pytest.raises(ValueError, match="sample_weight and X have incompatible shapes"):
        ours.SVC().fit(X, y, np.ones(19))
    with pytest.raises(ValueError, match="all samples have zero or negative weights"):
        ours.SVC().fit(X, y, -np.ones(20))
    with pytest.raises(ValueError, match="belong to the same class"):
        ours.SVC().fit(X, y, (y == 0).astype(float))
    with np.errstate(over="ignore"), pytest.raises(ValueError, match="so large that their squares overflow"):
        ours.SVC(gamma=1.0).fit(X * 1e200, y)
    with pytest.raises(ValueError, match="cannot use sparse input in 'SVC' trained on dense data"):
        ours.SVC().fit(X, y).predict(sp.csr_matrix(X))
