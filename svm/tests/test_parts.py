"""The solver's parts by themselves."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import scipy.sparse as sp
from numba.core import event
from sklearn.metrics.pairwise import pairwise_kernels, rbf_kernel

from harness.svm_oracle import two_classes
from paceline import numba_cache
from paceline.host.processes import available_bytes
from paceline_svm import SVC, compiled, estimator
from paceline_svm.compiled import LANES, Compilation, shown
from paceline_svm.gradients import RowCache
from paceline_svm.kernels import Kernel, expand
from paceline_svm.problem import Active
from paceline_svm.sample_forms import DenseSamples, SparseSamples
from paceline_svm.shrinking import Heuristic, may_violate
from paceline_svm.working_set import (
    Nominations,
    SubProblem,
    WorkingBlock,
    best,
    choose,
    scrambled,
    working_set_size,
)

pytestmark = pytest.mark.compiles

KERNELS = [Kernel("rbf", 0.3), Kernel("linear"), Kernel("poly", 0.2, 1.0, 3), Kernel("sigmoid", 0.1, 0.5)]


@pytest.mark.parametrize("form", [DenseSamples, SparseSamples])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_kernels_are_scikit_learns(kernel, dtype, form):
    """Across tiles and lanes, and where the exponential underflows."""
    generator = np.random.default_rng(0)
    left, right = generator.normal(size=(530, 7)), generator.normal(size=(1100, 7))
    left[3] *= 50
    right[right < 0] = 0
    names = {
        "rbf": ["gamma"],
        "linear": [],
        "poly": ["gamma", "coef0", "degree"],
        "sigmoid": ["gamma", "coef0"],
    }
    expected = pairwise_kernels(
        left, right, metric=kernel.name, **{name: getattr(kernel, name) for name in names[kernel.name]}
    )

    def samples(rows):
        rows = rows.astype(dtype)
        return form.of(sp.csr_matrix(rows) if form is SparseSamples else rows, np.arange(len(rows)))

    rtol = 1e-11 if dtype == np.float64 else 1e-3
    atol = 1e-14 if dtype == np.float64 else 2e-6
    values = kernel.values(samples(left), samples(right))
    scale = max(1.0, np.abs(expected).max() * 1e-3)
    assert values.dtype == dtype
    assert np.allclose(values, expected, rtol=rtol, atol=atol * scale)
    factors = generator.normal(size=(2, 530))
    sums = expand(kernel, samples(left), factors, samples(right))
    assert np.allclose(sums, factors @ expected, rtol=rtol, atol=1e3 * atol * scale)


@pytest.mark.parametrize("num_features", [3, 60], ids=["row by row", "all at once"])
@pytest.mark.parametrize("num_sides", [1, 2])
def test_a_sub_problem_ends_at_its_optimum(num_features, num_sides):
    generator = np.random.default_rng(1)
    num, C, tol, kernel = 150, 5.0, 1e-8, Kernel("rbf", 1.5 / num_features)
    X = DenseSamples.of(generator.normal(size=(num, num_features)), np.arange(num))
    signs = np.where(generator.random((num_sides, num)) < 0.5, 1.0, -1.0)
    linear, lower, upper = -signs, np.minimum(0, signs * C), np.maximum(0, signs * C)
    lower[:, 7] = upper[:, 7] = 0.0  # takes no part
    table = np.stack([linear, np.zeros_like(linear), lower, upper])
    beta, steps, decrease = SubProblem(kernel).solve(X, 0, table, tol, 10**6)
    f = kernel.values(X, X) @ beta.sum(axis=0) + linear
    assert steps > 0
    assert f[beta > lower].max() - f[beta < upper].min() <= tol * 1.01
    assert not beta[:, 7].any()
    assert beta.sum() == pytest.approx(0.0, abs=1e-10)
    assert decrease == pytest.approx(-0.5 * (beta * (f + linear)).sum(), rel=1e-9)
    assert SubProblem(kernel).solve(X, 0, table, tol, 5)[1] == 5


def test_the_block_of_a_working_set_keeps_what_the_last_one_knew():
    generator = np.random.default_rng(2)
    X = DenseSamples.of(generator.normal(size=(400, 60)), np.arange(400))
    kernel = Kernel("rbf", 0.02)
    block, kept = WorkingBlock(kernel), np.zeros(0, np.int64)
    for first, num_new in ((0, 130), (130, 70), (200, 150), (350, 10)):
        new = np.arange(first, first + num_new)
        chosen = np.concatenate([kept, new])
        panel = X.take(chosen)
        before = block.num_kernel_values
        K = block.among(panel, len(kept))
        assert np.allclose(K[:, : len(chosen)], kernel.values(panel, panel), atol=1e-12)
        assert not K[:, len(chosen) :].any()
        assert block.num_kernel_values - before == num_new * len(chosen)
        kept = new[:65]


def test_a_small_problem_with_room_for_a_few_rows_computes_them_again():
    X, y = two_classes(60)
    roomy, tight = (SVC(C=10.0, gamma=0.5, tol=1e-6, cache_size=size).fit(X, y) for size in (500, 0.008))
    assert tight.counters_[0].num_kernel_values > roomy.counters_[0].num_kernel_values
    assert np.array_equal(tight.dual_coef_, roomy.dual_coef_)


def test_the_cache_keeps_what_was_used_last():
    cache = RowCache(num_samples=10, num_columns=4, budget_bytes=3 * 4 * 4, dtype=np.float32)
    slots, missing = cache.slots_for(np.array([7, 1]))
    assert missing.all()
    cache.rows[slots] = [[7, 7.1, 7.2, 7.3], [1, 1.1, 1.2, 1.3]]
    _, missing = cache.slots_for(np.array([1, 5]))
    assert missing.tolist() == [False, True]
    assert cache.num_evictions == 0
    _, missing = cache.slots_for(np.array([5, 9]))
    assert missing.tolist() == [False, True]
    assert cache.num_evictions == 1
    slots, missing = cache.slots_for(np.array([1, 5]))  # 7 had to go
    assert not missing.any()
    assert cache.num_repeats == 0
    cache.compact(np.array([1, 3]))
    slots, missing = cache.slots_for(np.array([1, 7]))
    assert missing.tolist() == [False, True]
    assert cache.num_repeats == 1
    assert np.allclose(cache.rows[slots[0]], [1.1, 1.3])
    assert len(cache.rows) == 6  # rows are half as long, so twice as many fit
    cache.clear(4)
    assert cache.slots_for(np.array([1]))[1].all()
    slots, missing = cache.slots_for(np.arange(2, 10))  # room for three, none of them in use just now
    assert missing.all()
    assert (slots >= 0).sum() == 3
    cache.release()


def test_the_working_set_is_taken_in_turn_and_without_repetition():
    def rows(*pairs):
        return np.array([[value, number, 0, 0, 1] for value, number in pairs], float).reshape(-1, 5)

    one = Nominations(
        -3, 3, 5, 0, 3, 2, rows((-3, 4), (-1, 2)), rows((3, 2), (2, 0)), np.array([-np.inf]), None
    )
    two = Nominations(-3, 1, 5, 1, 4, True, rows((-3, 3)), rows(), np.array([0.25]), None)
    both = Nominations.unpack(np.stack([one.pack(2), two.pack(2)]), 2)
    assert (both.least, both.most, both.gap) == (-3, 3, 6)
    assert (both.num_active, both.num_support, both.num_free, both.is_short) == (10, 1, 7, True)
    assert both.kept.tolist() == [0.25]
    assert both.counts.tolist() == [5, 5]
    assert choose(both, 4)[:, 1].tolist() == [4, 2, 3, 0]
    assert choose(both, 9)[:, 1].tolist() == [4, 2, 3, 0]


def test_ties_at_the_start_are_broken_alike_however_the_samples_are_dealt_out():
    numbers = np.arange(1000)
    chosen = best(np.full(1000, -1.0), numbers, 10)
    assert set(chosen) == set(np.argsort(scrambled(numbers))[:10])
    assert np.ptp(chosen) > 500
    shares = [best(np.full(500, -1.0), numbers[part::2], 10) * 2 + part for part in (0, 1)]
    assert set(chosen) <= set(np.concatenate(shares))
    assert len(np.unique(scrambled(np.arange(10**5)))) == 10**5


@pytest.mark.parametrize(
    ("num", "free", "size"),
    [
        (2, 0, 2),
        (3, 0, 4),
        (2_048, 0, 2_048),
        (3_000, 0, 512),
        (3_000, 600, 750),
        (9_000, 800, 1_200),
        (9_000, 5_000, 2_048),
        (20_000, 0, 1_024),
        (50_000, 0, 2_048),
    ],
)
def test_sizes_of_working_sets(num, free, size):
    assert working_set_size(num, free) == size


def test_only_what_no_violation_can_contain_is_shrunk():
    """F against the extremes -1 (least that may grow) and 1 (largest that may shrink): too eager costs iterations."""
    f = np.array([-1.0, 0.99, 1.0, 1.01, -1.01, -1.0, 5.0, -5.0])
    beta = np.array([0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.5, 0.5])  # at the lower bound, the upper one, or free
    row = np.zeros((1, 8))
    samples = DenseSamples.of(np.zeros((8, 1)), np.arange(8))
    active = Active(samples, f, beta[None], row, row, row + 1, np.arange(8))
    assert may_violate(active, -1.0, 1.0).tolist() == [True, True, True, False, False, True, True, True]


def test_when_shrinking_is_due():
    five, single, auto = (Heuristic.named(name) for name in ("multi-5%", "single-500", "auto"))
    assert five.is_due(50, 1000, 40, 3, short_of_memory=False)
    assert not five.is_due(49, 1000, 40, 0, short_of_memory=True)
    assert single.is_due(500, 10**6, 10**6, 0, short_of_memory=False)
    assert not single.is_due(500, 10**6, 10**6, 1, short_of_memory=False)
    assert not auto.is_due(10**6, 1000, 1000, 0, short_of_memory=False)
    assert auto.is_due(50, 1000, 1000, 2, short_of_memory=True)
    adaptive, hundred = Heuristic.named("adaptive"), Heuristic.named("adaptive-100")
    assert adaptive == Heuristic.named("adaptive-5%")
    assert not adaptive.is_due(49, 1000, 400, 1, short_of_memory=False)
    assert adaptive.is_due(50, 1000, 400, 1, short_of_memory=False)
    assert not hundred.is_due(59, 1000, 60, 0, short_of_memory=False)
    assert hundred.is_due(60, 1000, 60, 0, short_of_memory=False), "fewer active samples than the threshold"
    assert not Heuristic.named("none").is_due(10**9, 10, 10, 0, short_of_memory=True)


def test_the_cache_grows_by_what_comes_back():
    """A row computed again for want of room makes room for one more, up to the limit; other rows do not."""
    cache = RowCache(num_samples=10, num_columns=4, budget_bytes=3 * 16, dtype=np.float32, most_bytes=5 * 16)
    assert (len(cache.rows), cache.most_rows) == (3, 5)
    for ids in ([0, 1, 2], [3, 4, 5]):
        cache.slots_for(np.array(ids))
    assert len(cache.rows) == 3
    slots, missing = cache.slots_for(np.array([0, 1, 3, 4]))
    assert (len(cache.rows), cache.num_repeats) == (5, 2)
    assert missing.tolist() == [True, True, False, False]
    assert len(set(slots.tolist())) == 4
    cache.slots_for(np.array([2, 5]))  # 2 comes back, too, but there may not be more
    assert len(cache.rows) == 5
    cache.clear(2)
    assert len(cache.rows) == 10


def test_auto_computes_fewer_rows_again(monkeypatch):
    """As much memory as pays: kernel values as with a large cache would be, within a few; and the same optimum.

    Where samples may be shrunk it does not grow: on large sets that took longer.
    """
    X, y = two_classes(3_300, 6, noise=1.0)
    monkeypatch.setattr(estimator, "_CACHE_BYTES", 4e6)
    fits = [SVC(C=50.0, shrinking=False, cache_size=size).fit(X, y) for size in (4, 500, "auto")]
    tight, roomy, auto = (fit.counters_[0].num_kernel_values for fit in fits)
    assert roomy < auto < 0.8 * tight
    assert fits[2].objective_[0] == pytest.approx(fits[1].objective_[0], rel=1e-5)
    assert len({SVC(C=50.0, cache_size=size).fit(X, y).counters_[0] for size in (4, "auto")}) == 1
    monkeypatch.setattr(estimator, "available_bytes", lambda: 0.0)
    assert SVC(C=50.0, shrinking=False).fit(X, y).counters_[0].num_kernel_values == tight


@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 3e-6), (np.float64, 1e-13)])
def test_sums_over_sparse_rows(dtype, bound):
    """Support vectors that fill no panel, rows without features, several expansions at once."""
    generator = np.random.default_rng(0)
    dense = generator.normal(size=(LANES + 40, 30)) * (generator.random((LANES + 40, 30)) < 0.2)
    dense[LANES + 10] = 0.0
    support, rows = (sp.csr_matrix(part.astype(dtype)) for part in np.split(dense, [LANES + 7]))
    factors = generator.normal(size=(3, LANES + 7))
    sums = expand(
        Kernel("rbf", 0.3),
        SparseSamples.of(support, np.arange(LANES + 7)),
        factors,
        SparseSamples.of(rows, np.arange(33)),
    )
    wanted = factors @ rbf_kernel(
        support.toarray().astype(np.float64), rows.toarray().astype(np.float64), gamma=0.3
    )
    assert np.abs(sums - wanted).max() < bound * np.abs(factors).sum()


def test_all_that_is_compiled_is_shown_if_asked_for(capsys):
    """A line at the end; nothing if nothing is compiled, or it takes no time and nobody asked."""
    add_one = numba.njit(lambda x: x + 1)
    with shown(always=True) as listener:
        add_one(1)
    assert (listener.num_functions, listener.seconds > 0) == (1, True)
    assert "compiling for this machine, 1 functions" in capsys.readouterr().err
    with shown(always=True):
        add_one(1)
    assert capsys.readouterr().err == ""
    with shown():
        add_one(1.0)
    assert capsys.readouterr().err == ""


class Timer:
    """In place of a `threading.Timer`, one that is up when the test says so."""

    def __init__(self, after_s, function, arguments):
        self.after_s, self.is_up, self.is_cancelled = after_s, lambda: function(*arguments), False
        Timer.made.append(self)

    def start(self): ...

    def cancel(self):
        self.is_cancelled = True


def test_what_takes_seconds_to_compile_is_said_once(monkeypatch, caplog):
    """By itself, or another process; what is short adds up."""
    monkeypatch.setattr(compiled.threading, "Timer", Timer)
    made = Timer.made = []
    compiling = event.Event("numba:compile", event.EventStatus.START)
    waiting = event.Event(numba_cache.WAITING, event.EventStatus.START)
    one, other = Compilation(shows_all=False), Compilation(shows_all=False)
    one.on_start(compiling)
    one.on_start(compiling)  # for the first
    one.on_end(compiling)
    assert not made[0].is_cancelled
    one.on_end(compiling)
    assert made[0].is_cancelled
    assert made[0].after_s == 2.0
    one.on_start(compiling)
    assert made[1].after_s == 2.0 - one.seconds < 2.0
    other.on_start(waiting)
    for timer in made[1:]:  # in another process the other would say so, too
        monkeypatch.setattr(Compilation, "_has_said", False)
        timer.is_up()
        timer.is_up()
    assert [(record.levelname, record.name) for record in caplog.records] == [("WARNING", "paceline.svm")] * 2
    assert [record.getMessage() for record in caplog.records] == [
        f"paceline_svm: {what} for this machine, once; `paceline svm compile` does so ahead of time"
        for what in ("compiling", "waiting for another process, which compiles")
    ]
    assert (one.num_functions, other.num_functions) == (3, 0)


def test_how_much_memory_there_is(tmp_path):
    """The kernel's word, or the container's limit if that is less; 0 where nobody says."""
    meminfo = tmp_path / "meminfo"
    assert available_bytes(meminfo, tmp_path) == 0.0
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    4 kB\n")
    assert available_bytes(meminfo, tmp_path) == 4096.0
    (tmp_path / "memory.current").write_text("1000\n")
    for limit, found in (("max", 4096.0), ("3000", 2000.0), ("500", 0.0)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert available_bytes(meminfo, tmp_path) == found
