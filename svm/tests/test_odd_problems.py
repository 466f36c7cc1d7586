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


def test_two_points_have_a_closed_form():
    """Between x and -x the border is at 0; alpha = 1 / (1 - K(x, -x)) unless C is less."""
    X, y = np.array([[1.0], [-1.0]]), np.array([1, 0])
    for C in (0.5, 100.0):
        model = ours.SVC(C=C, gamma=0.25, tol=1e-9).fit(X, y)
        alpha = min(C, 1 / (1 - np.exp(-0.25 * 4)))
        assert np.allclose(model.dual_coef_, [[-alpha, alpha]])
        assert model.intercept_[0] == pytest.approx(0.0, abs=1e-9)
