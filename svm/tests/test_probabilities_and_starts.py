"""Probabilities, warm starts, and models that leave the process."""

from __future__ import annotations

import contextlib

import joblib
import numpy as np
import pytest
from sklearn import svm as theirs
from sklearn.datasets import load_breast_cancer, load_digits, load_iris
from sklearn.metrics import log_loss

from harness.ranks import pool
from harness.svm_oracle import two_classes, working_sets_of
from paceline_svm import SVC, SVR, OneClassSVM, one_vs_one

pytestmark = pytest.mark.compiles


def test_a_sigmoid_is_found_again():
    """Labels drawn from a known sigmoid: its parameters come back within the noise of 20,000 draws."""
    generator = np.random.default_rng(0)
    decisions = generator.normal(scale=2.0, size=20_000)
    is_first = generator.random(20_000) < 1 / (1 + np.exp(-1.5 * decisions + 0.5))
    assert np.allclose(one_vs_one.sigmoid(decisions, is_first), [-1.5, 0.5], atol=0.08)


def test_pairs_that_agree_give_the_distribution_they_come_from():
    p = np.array([[0.1, 0.2, 0.7], [0.5, 0.25, 0.25]])
    pairwise = np.stack([p[:, i] / (p[:, i] + p[:, j]) for i, j in ((0, 1), (0, 2), (1, 2))], axis=1)
    assert np.allclose(one_vs_one.coupled(pairwise, 3), p)


@pytest.mark.parametrize("load", [load_iris, load_breast_cancer])
def test_probabilities_are_calibrated_and_reproducible(load):
    X, y = load(return_X_y=True)
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    model = SVC(probability=True, random_state=3).fit(X, y)
    p = model.predict_proba(X)
    assert p.shape == (len(y), len(model.classes_))
    assert np.allclose(p.sum(axis=1), 1)
    assert np.allclose(np.exp(model.predict_log_proba(X)), p)
    assert np.mean(p.argmax(axis=1) == model.predict(X)) > 0.98
    assert log_loss(y, p) < 0.15
    assert np.array_equal(SVC(probability=True, random_state=3).fit(X, y).predict_proba(X), p)
    assert not np.array_equal(SVC(probability=True, random_state=4).fit(X, y).predict_proba(X), p)
    assert not hasattr(SVC().fit(X, y), "predict_proba")


def test_probability_needs_two_samples_of_a_class():
    with pytest.raises(ValueError, match="every class needs at least 2 samples; one has 1"):
        SVC(probability=True).fit(np.arange(4.0)[:, None], [0, 0, 0, 1])


def probabilities(rank, num_ranks):
    X, y = load_iris(return_X_y=True)
    mine = np.array_split(np.arange(len(y)), num_ranks)[rank]
    return SVC(probability=True, random_state=1).fit(X[mine], y[mine]).predict_proba(X)


def test_probabilities_are_the_same_on_all_ranks_and_as_alone():
    X, y = load_iris(return_X_y=True)
    one, two = pool(2).run(probabilities)
    assert np.array_equal(one, two)
    assert np.allclose(one, SVC(probability=True, random_state=1).fit(X, y).predict_proba(X), atol=2e-3)


@pytest.mark.parametrize("size", [None, 64], ids=["whole", "working sets"])
def test_a_warm_start_needs_fewer_updates_for_the_same_optimum(size):
    X, y = two_classes(500)
    with working_sets_of(size) if size else contextlib.nullcontext():
        model = SVC(C=10.0, gamma=0.5, warm_start=True).fit(X[:40], y[:40])  # of other rows: no start
        cold = model.fit(X, y).n_iter_[0]
        objective = model.objective_[0]
        assert model.fit(X, y).n_iter_[0] < 0.1 * cold
        assert model.objective_[0] == pytest.approx(objective, rel=1e-6)
        model.set_params(C=2.0).fit(X, y)  # what is too large now is cut
        assert model.objective_[0] == pytest.approx(SVC(C=2.0, gamma=0.5).fit(X, y).objective_[0], rel=1e-6)
        assert model.gap_[0] <= 1e-3


def test_a_warm_start_of_novelty_detection():
    X, _ = two_classes(300)
    model = OneClassSVM(nu=0.3, gamma=0.5, tol=1e-5, warm_start=True)
    cold = model.fit(X).n_iter_
    assert model.fit(X).n_iter_ < 0.1 * cold
    for nu in (0.1, 0.6):  # less has to be scaled down, more to be filled up
        again, new = model.set_params(nu=nu).fit(X), OneClassSVM(nu=nu, gamma=0.5, tol=1e-5).fit(X)
        assert again.dual_coef_.sum() == pytest.approx(nu * 300)
        assert again.objective_ == pytest.approx(new.objective_, rel=1e-6)


def test_a_warm_start_of_regression_and_of_many_classes():
    X, y = load_digits(return_X_y=True)
    for model in (SVC(gamma=0.001, warm_start=True), SVR(gamma=0.001, C=5.0, warm_start=True)):
        cold = np.sum(model.fit(X[:600], y[:600]).n_iter_)
        assert np.sum(model.fit(X[:600], y[:600]).n_iter_) < 0.1 * cold


@pytest.mark.parametrize("estimator", [SVC(probability=True, random_state=0), SVR(), OneClassSVM()], ids=str)
def test_joblib_and_skops_export(estimator, tmp_path):
    import skops.io  # looks through every loaded module for seconds

    X, y = two_classes(120)
    model = estimator.fit(X, y)
    joblib.dump(model, tmp_path / "model.joblib")
    assert np.array_equal(joblib.load(tmp_path / "model.joblib").predict(X), model.predict(X))
    skops.io.dump(model, tmp_path / "model.skops")
    types = skops.io.get_untrusted_types(file=tmp_path / "model.skops")
    assert all(name.startswith("paceline_svm.") for name in types)
    loaded = skops.io.load(tmp_path / "model.skops", trusted=types)
    assert np.array_equal(loaded.predict(X), model.predict(X))


def test_linear_weights_are_scikit_learns():
    X, y = load_iris(return_X_y=True)
    mine, other = (kind(kernel="linear", tol=1e-6).fit(X, y) for kind in (SVC, theirs.SVC))
    assert mine.coef_.shape == other.coef_.shape
    assert np.allclose(mine.coef_, other.coef_, atol=1e-3)
