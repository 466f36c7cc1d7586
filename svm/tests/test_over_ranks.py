"""Any number of ranks and any heuristic: the same optimum, and a gap that is true."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
from unittest import mock

import numpy as np
import pytest
import scipy.sparse as sp
import torch.distributed as dist

from harness.ranks import Ranks, pool
from harness.svm_oracle import truth, two_classes, working_sets_of
from paceline_lab.doubles.in_process import InProcessWorld
from paceline_svm import (
    SVC,
    SVR,
    OneClassSVM,
    communicator,
    estimator,
    one_vs_one,
    placement,
    shrinking,
    solver,
)
from paceline_svm.communicator import GroupCommunicator
from paceline_svm.shrinking import ShrunkGroup, ShrunkSamples
from paceline_svm.stopping import OptimalityCheck

pytestmark = pytest.mark.compiles

HEURISTICS = [
    "none",
    "auto",
    "adaptive",
    *(
        f"{often}-{threshold}"
        for often in ("single", "multi")
        for threshold in (2, 500, 1000, "5%", "10%", "50%")
    ),
    "adaptive-500",
]
C, GAMMA, TOL = 4.0, 0.5, 1e-4
SETTINGS = {"C": C, "gamma": GAMMA, "tol": TOL}


def data():
    return two_classes(400, 4, seed=4)


def fit_in_small_sets(heuristic, rows="own"):
    """A working set of 64 takes many iterations, and a small cache evicts rows, so shrinking has something to do."""
    X, y = data()
    model = SVC(**SETTINGS, shrinking=heuristic, cache_size=0.02, rows=rows)
    mine = (
        np.array_split(np.arange(len(y)), dist.get_world_size())[dist.get_rank()]
        if rows == "own"
        else slice(None)
    )
    with working_sets_of(64):
        return model.fit(X[mine], y[mine])


def fit_all(_rank, _num_ranks, heuristics):
    models = [fit_in_small_sets(heuristic) for heuristic in heuristics]
    return [pickle.dumps(model) for model in models]


def fit_as_threads(num_ranks, heuristic):
    """Every rank's model; ranks are threads, as processes on two cores mostly wait for each other."""
    X, y = data()
    here = threading.local()

    def task(group):
        here.communicator = communicator.GroupCommunicator(group)
        mine = np.array_split(np.arange(len(y)), num_ranks)[group.rank()]
        return SVC(**SETTINGS, shrinking=heuristic, cache_size=0.02).fit(X[mine], y[mine])

    def world_of_this_thread(_rows):
        return here.communicator

    with working_sets_of(64), mock.patch.object(estimator, "communicator_for", world_of_this_thread):
        return InProcessWorld(num_ranks).run(task)


@pytest.fixture(scope="module")
def models():
    """By number of ranks: for every heuristic, every rank's model."""
    return {num: [fit_as_threads(num, heuristic) for heuristic in HEURISTICS] for num in (1, 2, 3, 4)}


def test_processes_end_with_what_threads_do(models):
    """Rank by rank and bit by bit, with the same exchanges."""
    some = [HEURISTICS.index(name) for name in ("none", "multi-2", "single-50%")]
    for mine in pool(2).run(fit_all, [HEURISTICS[at] for at in some]):
        for packed, at in zip(mine, some, strict=True):
            model, expected = pickle.loads(packed), models[2][at][0]
            assert np.array_equal(model.support_, expected.support_)
            assert np.array_equal(model.dual_coef_, expected.dual_coef_)
            assert model.counters_[0].num_kernel_values > 0
            assert model.counters_[0].num_exchanges == expected.counters_[0].num_exchanges


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("heuristic", HEURISTICS)
def test_the_optimum_is_the_same_and_the_gap_is_true(models, heuristic, num_ranks):
    X, y = data()
    at = HEURISTICS.index(heuristic)
    first, *others = models[num_ranks][at]
    reference = truth(X, y, models[1][0][0], C, gamma=GAMMA)
    mine = truth(X, y, first, C, gamma=GAMMA)
    assert mine.gap <= TOL * (1 + 1e-6)
    assert first.gap_[0] == pytest.approx(mine.gap, abs=1e-9)
    assert mine.objective == pytest.approx(reference.objective, rel=1e-6)
    assert first.objective_[0] == pytest.approx(mine.objective, rel=1e-6)
    assert abs(first.intercept_[0] - models[1][0][0].intercept_[0]) <= 2 * TOL
    for other in others:
        assert np.array_equal(other.support_, first.support_)
        assert np.array_equal(other.dual_coef_, first.dual_coef_)
        assert np.array_equal(other.intercept_, first.intercept_)
        assert np.array_equal(other.support_vectors_, X[first.support_])


def test_heuristics_do_what_their_names_say(models):
    counters = {name: models[2][at][0].counters_[0] for at, name in enumerate(HEURISTICS)}
    assert counters["none"].least_active == 400
    assert counters["none"].num_unshrinks == 0
    assert counters["single-5%"].num_unshrinks == 1
    assert counters["multi-2"].least_active < 300
    assert counters["multi-5%"].num_kernel_values < 0.8 * counters["none"].num_kernel_values
    assert counters["auto"].least_active < 400  # the cache is too small here
    assert counters["adaptive"].num_kernel_values < 0.8 * counters["none"].num_kernel_values


def test_shrinking_leaves_itself_alone_where_the_cache_holds_all_rows():
    X, y = data()
    with working_sets_of(64):
        assert SVC(**SETTINGS).fit(X, y).counters_[0].least_active == 400


def test_one_exchange_for_many_pair_updates(models):
    """The paper's solver needs five collectives a pair update; this needs a few for tens of updates."""
    for num_ranks in (2, 3, 4):
        counters = models[num_ranks][0][0].counters_[0]
        assert counters.num_collectives < 2 * counters.num_exchanges + 60
        assert counters.num_steps > 10 * counters.num_exchanges


def count_exchanges(rank, num_ranks, width):
    """What rank 0 does until it works on the problem: by the form of rows, and by where it is solved."""
    X, y = two_classes(400, width, seed=4)
    mine = np.array_split(np.arange(len(y)), num_ranks)[rank]
    trace, gammas = [], []
    do, nominate, solve_small = (
        GroupCommunicator._do,
        solver.Solver._nominate,
        placement.solve_small,
    )

    def watched(function, word):
        def call(*words):
            trace.append(word or words[-1])
            return function(*words)

        return call

    with (
        mock.patch.object(GroupCommunicator, "_do", watched(do, None)),
        mock.patch.object(solver.Solver, "_nominate", watched(nominate, "works")),
        mock.patch.object(placement, "solve_small", watched(solve_small, "works")),
        mock.patch.object(one_vs_one.placement, "solve_small", watched(solve_small, "works")),
    ):
        for rows in (X, sp.csr_matrix(X)):
            for where in (
                contextlib.nullcontext(),
                mock.patch.object(placement, "LARGEST", 0),
                working_sets_of(64),
            ):
                with where:
                    gammas.append(SVC().fit(rows[mine], y[mine])._gamma)
                trace.append("end")
    fits = [fit.split() for fit in " ".join(word.replace(" ", "_") for word in trace).split("end")[:-1]]
    return [fit[: fit.index("works")] for fit in fits if rank == 0], gammas


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_three_exchanges_before_the_first_working_set(num_ranks):
    """Facts, what every sample is, and samples; also where facts are hundreds of features' sums."""
    for width in (4, 300):
        X, y = two_classes(400, width, seed=4)
        for rows in (X, sp.csr_matrix(X)):  # compiled here, where no group's timeout runs
            SVC().fit(rows, y)
            with working_sets_of(64):
                SVC().fit(rows, y)
        results = pool(num_ranks).run(count_exchanges, width)
        traces = results[0][0]
        assert len(traces) == 6
        assert [len(trace) for trace in traces] == [3] * 6
        assert [trace[:2] for trace in traces] == [["checking_the_arguments", "numbering_the_samples"]] * 6
        gammas = {gamma for _, of_rank in results for gamma in of_rank[:3]}  # of dense rows
        assert len(gammas) == 1
        assert gammas.pop() == pytest.approx(SVC().fit(X, y)._gamma, rel=1e-13)


def nothing_changed(self, weights, rows, positions):
    return 0.0


def without_reconstruction(monkeypatch):
    """The mutant: gradients of shrunk samples stay as they were, and what the gradients say is believed."""
    monkeypatch.setattr(ShrunkSamples, "_sums", nothing_changed)
    monkeypatch.setattr(
        OptimalityCheck, "check", lambda self, everyone: np.subtract(*self.extremes(everyone, 0.0)[1::-1])
    )


def test_without_reconstruction_a_wrong_answer_would_be_reported(monkeypatch):
    """The oracle sees what was shrunk falsely; papers call the mutant the approximate variant."""

    def true_gaps():
        for seed in range(4):
            X, y = two_classes(200, 2, seed=seed)
            with working_sets_of(4):
                model = SVC(C=C, gamma=GAMMA, shrinking="multi-2").fit(X, y)
            assert model.gap_[0] <= 1e-3  # the mutant says so too
            yield truth(X, y, model, C, gamma=GAMMA).gap

    assert max(true_gaps()) <= 1e-3 * (1 + 1e-6)
    without_reconstruction(monkeypatch)
    assert max(true_gaps()) > 1e-2


def test_stale_gradients_are_noticed_even_if_reconstruction_forgets_them(monkeypatch):
    """The check in double precision does not trust the gradients it is given."""
    X, y = data()
    monkeypatch.setattr(ShrunkSamples, "_sums", nothing_changed)
    with working_sets_of(8):
        model = SVC(C=C, gamma=GAMMA, shrinking="multi-2").fit(X, y)
    assert model.counters_[0].num_unshrinks > 0
    assert truth(X, y, model, C, gamma=GAMMA).gap <= 1e-3 * (1 + 1e-6)


def one_reference(self, going):
    """The mutant: all groups get the coefficients of the moment when the last one left."""
    positions = self._return_to_owners(going, "")
    if len(positions):
        self._groups = [ShrunkGroup(group.positions, self._chosen.weights.copy()) for group in self._groups]
        self._groups.append(ShrunkGroup(positions, self._chosen.weights.copy()))


@pytest.mark.parametrize("mutant", [None, one_reference])
def test_reconstruction_is_exact_and_needs_a_reference_for_every_group(mutant, monkeypatch):
    """What comes back is what the coefficients say, to the rounding of double precision."""
    X, y = data()
    unshrink, off, groups = ShrunkSamples.unshrink, [], []

    def compared(self, active, rows):
        groups.append(len(self._groups))
        everyone = unshrink(self, active, rows)
        exact = OptimalityCheck(self._problem, self._communicator, self._chosen, TOL).exact(
            np.arange(len(rows))
        )
        off.append(np.abs(everyone.g - exact).max())
        return everyone

    monkeypatch.setattr(ShrunkSamples, "unshrink", compared)
    if mutant is not None:
        monkeypatch.setattr(ShrunkSamples, "add", mutant)
    with working_sets_of(32):
        SVC(C=C, gamma=GAMMA, tol=1e-5, shrinking="multi-2").fit(X, y)
    assert max(groups) > 1
    assert (max(off) < 1e-9) == (mutant is None)
    assert mutant is None or max(off) > 1e-3


def fit_sorted_rows(rank, num_ranks):
    """One rank holds what is hard: without balancing, it would work alone once the rest is shrunk."""
    X, y = data()
    order = np.argsort(np.abs(SVC(**SETTINGS, rows="alone").fit(X, y).decision_function(X)))
    mine = np.array_split(order, num_ranks)[rank]
    counts, balance = [], solver.balanced

    def watched(communicator, active, before):
        after = balance(communicator, active, before)
        counts.append((before.tolist(), len(after)))
        return after

    with (
        mock.patch.object(solver, "balanced", watched),
        mock.patch.object(shrinking, "_IMBALANCE_SAMPLES", 8),
        working_sets_of(32),
    ):
        model = SVC(**SETTINGS, shrinking="multi-2", cache_size=0.01).fit(X[mine], y[mine])
    return counts, model, order


def fit_where_ranks_round_differently(rank, num_ranks):
    """One rank pretends to be another processor, and no rank may hold all rows."""
    with (
        mock.patch.object(communicator, "_what_rounds", return_value=str(rank)),
        mock.patch.object(solver, "_ROWS_RATIO", 0.0),
    ):
        return fit_in_small_sets("multi-2")


def test_ranks_that_round_differently_let_one_of_them_decide(models):
    X, y = data()
    one, two = pool(2).run(fit_where_ranks_round_differently)
    assert np.array_equal(one.dual_coef_, two.dual_coef_)
    assert truth(X, y, one, C, gamma=GAMMA).gap <= TOL * (1 + 1e-6)
    alike = models[2][HEURISTICS.index("multi-2")][0].counters_[0]
    assert one.counters_[0].num_collectives > alike.num_collectives + 10  # rows and coefficients are sent


def test_active_samples_are_balanced_and_come_home():
    X, y = data()
    results = pool(3).run(fit_sorted_rows)
    assert len(results[0][0]) > 0
    for moves in zip(*(counts for counts, _, _ in results), strict=True):
        before, after = moves[0][0], [len_after for _, len_after in moves]
        assert max(before) > 1.25 * np.mean(before)
        assert sum(after) == sum(before)
        assert max(after) - min(after) <= 1
    _, model, order = results[0]
    true = truth(X[order], y[order], model, C, gamma=GAMMA)
    assert true.gap <= TOL * (1 + 1e-6)
    assert true.objective == pytest.approx(
        truth(X, y, SVC(**SETTINGS).fit(X, y), C, gamma=GAMMA).objective, rel=1e-6
    )


def fit_the_rest(rank, num_ranks):
    """Other estimators, sparse rows, many classes, unequal parts, rows that all ranks have."""
    X, y = data()
    cut = {0: slice(0, 300), 1: slice(300, 310), 2: slice(310, 400)}[rank]
    three = y + (X[:, 2] > 1)
    weights = np.where(X[:, 3] > 1, 0.0, 1.0)
    tight = {"gamma": GAMMA, "tol": 1e-6}
    return [
        SVC(**tight).fit(sp.csr_matrix(X[cut]), three[cut]).decision_function(sp.csr_matrix(X)),
        SVC(**tight, rows="all").fit(X, three).decision_function(X),
        SVC(**tight, class_weight="balanced").fit(X[cut], y[cut], weights[cut]).decision_function(X),
        SVC(**tight, class_weight={1: 0}).fit(X[cut], three[cut]).decision_function(X),
        SVC(kernel="linear", tol=1e-6).fit(X[cut], y[cut]).decision_function(X),
        SVC(kernel="precomputed", tol=1e-6).fit((X @ X.T)[cut], y[cut]).decision_function(X @ X.T),
        SVC(kernel=lambda a, b: a @ b.T, tol=1e-6).fit(X[cut], y[cut]).decision_function(X),
        SVR(tol=1e-6).fit(X[cut], X[cut, 0] ** 2).predict(X),
        OneClassSVM(tol=1e-6).fit(X[cut], sample_weight=weights[cut]).decision_function(X),
        SVC(**tight, rows="alone").fit(X, y).decision_function(X),
    ]


def fit_the_rest_alone():
    X, y = data()
    three = y + (X[:, 2] > 1)
    weights = np.where(X[:, 3] > 1, 0.0, 1.0)
    tight = {"gamma": GAMMA, "tol": 1e-6}
    linear = SVC(kernel="linear", tol=1e-6).fit(X, y).decision_function(X)
    return [
        *[SVC(**tight).fit(X, three).decision_function(X)] * 2,
        SVC(**tight, class_weight="balanced").fit(X, y, weights).decision_function(X),
        SVC(**tight, class_weight={1: 0}).fit(X, three).decision_function(X),
        *[linear] * 3,
        SVR(tol=1e-6).fit(X, X[:, 0] ** 2).predict(X),
        OneClassSVM(tol=1e-6).fit(X, sample_weight=weights).decision_function(X),
        SVC(**tight).fit(X, y).decision_function(X),
    ]


def test_every_estimator_and_form_of_data_over_three_unequal_ranks():
    expected = fit_the_rest_alone()
    for results in pool(3).run(fit_the_rest):
        for result, wanted in zip(results, expected, strict=True):
            assert np.allclose(result, wanted, atol=1e-4)


def spoil(rank, _num_ranks):
    X, y = two_classes(60)
    if rank == 1:
        X[3, 2] = np.nan
    try:
        SVC().fit(X, y)
    except ValueError as error:
        first = str(error)
    try:
        SVC().fit(X[:, :2], np.full(60, "same"))
    except ValueError as error:
        return first, str(error)
    return "no error"


def test_what_is_wrong_on_one_rank_is_an_error_on_all():
    told, own = pool(2).run(spoil)
    assert told[0].startswith("rank 1 cannot fit, so none can: Input X contains NaN")
    assert own[0].startswith("Input X contains NaN")
    assert told[1] == own[1] == "The number of classes has to be greater than one; got 1 class"


def die_in_mid_fit(rank, _num_ranks, victim):
    X, y = data()

    gather = solver.Solver._nominate
    seen = []

    def nominate(self):
        seen.append(None)
        if rank == victim and len(seen) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(self)

    solver.Solver._nominate = nominate
    try:
        with working_sets_of(32):
            SVC(**SETTINGS).fit(X[rank::3], y[rank::3])
    except RuntimeError as error:
        return [kind.__name__ for kind in type(error).__mro__], str(error)
    return "no error"


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_in_mid_fit_is_named(victim):
    with Ranks(3, group_timeout_s=50.0) as ranks:
        outcomes = ranks.outcomes(die_in_mid_fit, victim)
    for outcome in outcomes:
        if outcome.rank == victim:
            assert outcome.exit_code == -signal.SIGKILL
            continue
        kinds, message = outcome.value
        assert "PeerLostError" in kinds
        assert f"rank {victim} (process" in message
        assert "has died. The model was not fitted." in message
