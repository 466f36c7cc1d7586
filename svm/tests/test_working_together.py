"""Threads and ranks: how many there are, and who solves, changes nothing but the time."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_info, threadpool_limits

from harness.ranks import pool
from harness.svm_oracle import truth, two_classes, working_sets_of
from paceline_svm import SVC, SVR, placement
from paceline_svm.thread_pool import for_each, num_threads, thread_pool

pytestmark = pytest.mark.compiles


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def fits():
    """A binary problem in working sets and 45 pairs of classes: coefficients and predictions."""
    X, y = two_classes(2500)
    digits, names = load_digits(return_X_y=True)
    with working_sets_of(256):
        one = SVC(C=5.0, gamma=0.5).fit(X, y)
    many = SVC(gamma=0.001).fit(digits, names)
    return [one.dual_coef_, one.decision_function(X), many.dual_coef_, many.decision_function(digits)]


def test_two_threads_find_what_one_finds_to_the_last_bit(two_threads):
    seen = []
    with mock.patch.object(placement, "Solver", side_effect=placement.Solver) as made:
        made.side_effect = lambda *_: seen.append(num_threads()) or mock.DEFAULT
        made.return_value.solve.side_effect = ValueError("looked")
        with working_sets_of(64), pytest.raises(ValueError, match="looked"):
            SVC().fit(*two_classes(100))
    assert seen == [2]
    together = fits()
    torch.set_num_threads(1)
    for one, two in zip(fits(), together, strict=True):
        assert np.array_equal(one, two)


def test_one_thread_is_one_of_blas_too():
    """Where its products were computed by more, they differed in the last bit from those of two threads of ours."""
    with threadpool_limits(2, user_api="blas"), thread_pool(1):
        found = {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}
    assert found == {1}


def test_a_thread_pool_does_every_piece_once_and_raises_what_a_piece_raises(two_threads):
    for num_pieces in (0, 1, 2, 7):
        done = []
        with thread_pool() as num:
            for_each(done.append, range(num_pieces))
        assert num == 2
        assert sorted(done) == list(range(num_pieces))
    with thread_pool(), pytest.raises(ZeroDivisionError):
        for_each(lambda piece: 1 // (piece - 1), range(4))
    assert num_threads() == 1


def fit_both_ways(rank, num_ranks):
    """By one rank, as rows are short, and by both together."""
    X, y = two_classes(500)
    mine = slice(rank, None, num_ranks)
    settings = {"C": 4.0, "gamma": 0.5, "tol": 1e-4}
    with mock.patch.object(placement, "LARGEST", 0):
        one = SVC(**settings).fit(X[mine], y[mine])
        target = SVR(**settings).fit(X[mine], X[mine, 0] ** 2)
    with working_sets_of(64):
        all_ = SVC(**settings).fit(X[mine], y[mine])
    return [
        (model.dual_coef_, model.support_, model.intercept_, model.objective_)
        for model in (one, target, all_)
    ]


def test_a_problem_of_short_rows_is_solved_by_one_rank_for_all():
    zero, one = pool(2).run(fit_both_ways)
    for mine, other in zip(zero, one, strict=True):
        for left, right in zip(mine, other, strict=True):
            assert np.array_equal(left, right)
    X, y = two_classes(500)
    order = np.concatenate([np.arange(0, 500, 2), np.arange(1, 500, 2)])
    with mock.patch.object(placement, "LARGEST", 0):
        alone = SVC(C=4.0, gamma=0.5, tol=1e-4).fit(X[order], y[order])
    assert np.array_equal(alone.support_, zero[0][1])
    # The mean of the rows is summed in another order.
    assert np.allclose(alone.dual_coef_, zero[0][0], atol=1e-6)
    assert truth(X[order], y[order], alone, 4.0, gamma=0.5).gap <= 1e-4 * (1 + 1e-6)
    assert zero[2][3] == pytest.approx(zero[0][3], rel=1e-6)


def test_long_rows_are_shared_and_short_ones_are_not():
    """An estimate that every rank makes alike: 20 microseconds a row."""
    sizes = (8_000, 20), (8_000, 784), (40_000, 20)
    shared = [placement.row_s(num, num * width, False) >= placement._LEAST_ROW_S for num, width in sizes]
    assert shared == [False, True, True]
