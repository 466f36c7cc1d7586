"""Random small problems of the kinds that break solvers."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn import svm as theirs

import paceline_svm as ours
from harness.svm_oracle import truth, working_sets_of
from paceline_svm import placement

pytestmark = pytest.mark.compiles

# With coefficients so large, gradients in single precision err by more than `tol`: pair updates never ended.
_IN_CIRCLES = (
    np.array([[0.126], [-0.132], [0.640], [0.105], [-0.536], [0.362], [1.304], [0.947]]),
    np.array([0, 1, 1, 1, 0, 1, 1, 1]),
)


@st.composite
def problems(draw):
    """Duplicates, identical rows of opposite classes, constant features, one class nearly empty."""
    generator = np.random.default_rng(draw(st.integers(0, 10**6)))
    num, num_features = draw(st.integers(2, 60)), draw(st.integers(1, 4))
    X = generator.normal(size=(num, num_features))
    y = generator.integers(0, 2, size=num)
    if draw(st.booleans()):
        X = X[generator.integers(0, num, size=num)]
    if draw(st.booleans()):
        X[:, 0] = 3.0
    if draw(st.booleans()):
        y[:] = 0
    y[0], y[-1] = 0, 1
    return X, y


@settings(max_examples=40, deadline=None)
@given(
    problems(),
    st.sampled_from([1e-3, 1.0, 100.0, 1e6]),
    st.sampled_from([1e-6, 0.1, 1.0, 1e4]),
    st.sampled_from([None, 4, 10, 100]),
)
@example((np.array([[0.0], [0.0]]), np.array([0, 1])), 1.0, 1.0, 100)
@example(_IN_CIRCLES, 1e6, 0.1, 100)
def test_the_gap_is_true_and_the_objective_libsvms(problem, C, gamma, working_set):
    X, y = problem
    tol = 1e-3
    if working_set in (4, 10):  # at C = 1e6, so few variables at a time zigzag into the limit of iterations
        C = min(C, 100.0)
    with working_sets_of(working_set) if working_set else contextlib.nullcontext():
        mine = ours.SVC(C=C, gamma=gamma, tol=tol, shrinking="multi-2").fit(X, y)
    other = theirs.SVC(C=C, gamma=gamma, tol=1e-4).fit(X, y)
    one, two = truth(X, y, mine, C, gamma=gamma), truth(X, y, other, C, gamma=gamma)
    scale = max(1.0, C * len(y))  # of sums of coefficients
    assert one.gap <= tol + 1e-13 * scale
    # A gap bounds the distance to the optimum: sum of coefficients times gap.
    distance = np.abs(mine.dual_coef_).sum() * tol
    assert one.objective <= two.objective + distance + 1e-9 * scale
    assert one.imbalance <= 1e-12 * scale


@pytest.mark.parametrize("largest", [placement.LARGEST, 0])
@pytest.mark.parametrize("gone", [[2], [0], [3, 1]])
def test_a_class_without_weight_is_never_predicted(gone, largest, monkeypatch):
    """By `class_weight` or by its samples' weights: the model of the other classes, however pairs are solved."""
    monkeypatch.setattr(placement, "LARGEST", largest)
    generator = np.random.default_rng(0)
    y = np.arange(80) % 4
    X = generator.normal(size=(80, 3)) + 1.5 * y[:, None]
    keeps = ~np.isin(y, gone)
    others = [label for label in range(4) if label not in gone]
    settings = {"kernel": "linear", "probability": True, "random_state": 0}
    expected = ours.SVC(**settings).fit(X[keeps], y[keeps])
    by_class = ours.SVC(**settings, class_weight=dict.fromkeys(gone, 0)).fit(X, y)
    by_sample = ours.SVC(**settings).fit(X, y, keeps * 1.0)
    for model in (by_class, by_sample):
        assert model.classes_.tolist() == [0, 1, 2, 3]
        assert model.n_support_[others].tolist() == expected.n_support_.tolist()
        assert not model.n_support_[gone].any()
        assert np.array_equal(model.predict(X), expected.predict(X))
        assert np.isfinite(model.decision_function(X)).all()
        assert not np.isin(model.decision_function(X).argmax(axis=1), gone).any()
        assert np.allclose(model.predict_proba(X)[:, others], expected.predict_proba(X), atol=1e-6)
        assert np.isneginf(model.predict_log_proba(X)[:, gone]).all()
        assert model.coef_.shape == (6, 3)
    by_function = ours.SVC(kernel=lambda a, b: a @ b.T, class_weight=dict.fromkeys(gone, 0)).fit(X, y)
    assert np.array_equal(by_function.predict(X), expected.predict(X))


def test_one_class_with_weight_is_not_enough():
    X, y = np.arange(12.0).reshape(6, 2), np.array([0, 0, 1, 1, 2, 2])
    for given_class_weight, weights in (({1: 0, 2: 0}, None), ({1: 0}, y != 2)):
        with pytest.raises(ValueError, match="all samples with positive weights belong to the same class"):
            ours.SVC(class_weight=given_class_weight).fit(X, y, weights)
    with pytest.raises(ValueError, match="all classes have the weight 0"):
        ours.SVC(class_weight=dict.fromkeys(range(3), 0)).fit(X, y)


def test_two_points_have_a_closed_form():
    """Between x and -x the border is at 0; alpha = 1 / (1 - K(x, -x)) unless C is less."""
    X, y = np.array([[1.0], [-1.0]]), np.array([1, 0])
    for C in (0.5, 100.0):
        model = ours.SVC(C=C, gamma=0.25, tol=1e-9).fit(X, y)
        alpha = min(C, 1 / (1 - np.exp(-0.25 * 4)))
        assert np.allclose(model.dual_coef_, [[-alpha, alpha]])
        assert model.intercept_[0] == pytest.approx(0.0, abs=1e-9)
