"""Shares by speed: the best ones against brute force, estimates from steps, and when balance acts, without a clock."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.ranks import seeded
from paceline.data import Balance, GlobalBatch, StepCut, StepWork
from paceline.errors import ConfigurationError
from paceline.planning import Speed, SpeedEstimate, best_shares, lower_bound_s, makespan_s

speeds = st.builds(Speed, st.sampled_from([0.0, 0.5, 3.0]), st.sampled_from([0.1, 0.7, 1.0, 4.0]))


@settings(deadline=None, max_examples=80)
@given(
    ranks=st.lists(st.tuples(speeds, st.integers(1, 12)), min_size=1, max_size=3),
    total=st.integers(1, 12),
    least=st.integers(0, 2),
)
def test_the_best_shares(ranks, total, least):
    """No other way to divide the samples finishes sooner; the ideal is a bound; what cannot be is refused."""
    known, most = [speed for speed, _ in ranks], [limit for _, limit in ranks]
    possible = [
        shares
        for shares in itertools.product(*(range(least, limit + 1) for limit in most))
        if sum(shares) == total
    ]
    if not possible:
        with pytest.raises(ConfigurationError, match="cannot be divided"):
            best_shares(known, total, most, least)
        return
    found = best_shares(known, total, most, least)
    assert found in possible
    if least or not any(speed.fixed_s for speed in known):
        assert makespan_s(known, found) == pytest.approx(min(makespan_s(known, each) for each in possible))
    assert lower_bound_s(known, total) <= makespan_s(known, found) + 1e-9


def test_shares_in_units():
    """As micro-steps of a fixed size."""
    assert best_shares([Speed(0, 1), Speed(0, 2)], 48, unit=8) == (32, 16)
    with pytest.raises(ConfigurationError, match="in units of 8"):
        best_shares([Speed(0, 1), Speed(0, 2)], 48, most=[16, 16], unit=8)


def test_fixed_time_is_told_apart_by_steps_of_different_size():
    """Before that all of it is per sample; a sudden change is believed in its fourth step, a single slow one is not."""
    estimate = SpeedEstimate()
    for _ in range(3):
        estimate.add(30, 40.0)
    assert estimate.speed == Speed(0.0, pytest.approx(4 / 3))
    for _ in range(3):
        estimate.add(10, 20.0)
    assert estimate.speed == Speed(pytest.approx(10), pytest.approx(1))
    estimate.add(10, 90.0)
    assert estimate.speed.step_s(10) == pytest.approx(20)
    estimate.add(10, 20.0)
    for _ in range(3):
        estimate.add(10, 60.0)
    assert estimate.speed.step_s(10) < 50
    estimate.add(10, 60.0)
    assert estimate.speed == Speed(pytest.approx(30), pytest.approx(3))


def test_fixed_time_is_believed_as_far_as_noise_allows():
    """Steps of one size that differ by a tenth do not tell a fixed time from none; a tenth of that does."""
    for noise, least_s, most_s in ((1.0, 0.0, 0.0), (0.1, 4.0, 10.0)):
        estimate = SpeedEstimate()
        for n in (30, 25):  # 10 s and a second a sample
            for error in (1, -1, 0, 1, -1, 0, 1, -1):
                estimate.add(n, 10 + n + error * 4 * noise)
        assert least_s <= estimate.speed.fixed_s <= most_s, noise
        assert estimate.speed.step_s(25) == pytest.approx(35)


class Simulated:
    """Steps of ranks with these speeds; measurements are a step late, as over a process group."""

    def __init__(self, speeds, batch, noise=0.0, **kwargs):
        self.speeds, self.batch, self.noise = list(speeds), batch, noise
        self.balance = Balance(**kwargs)
        self.balance.tells = False
        self.source, self.before = seeded("noise"), None

    def step(self):
        """How long it takes, relative to the ideal."""
        if self.before is not None:
            self.batch = self.balance.observe(self.batch, self.before) or self.batch
        pairs = list(zip(self.speeds, self.batch.samples, strict=True))
        self.before = [StepWork(n, s.step_s(n) * (1 + self.source.gauss(0, self.noise))) for s, n in pairs]
        return makespan_s(self.speeds, self.batch.samples) / lower_bound_s(self.speeds, self.batch.size)


@pytest.mark.parametrize(
    ("slowness", "fixed_s"),
    [((1, 1, 2), 0.0), ((1, 8), 0.0), ((1, 8), 20.0), ((1, 1, 2, 2, 4, 4, 8, 8), 5.0), ((1, 3, 5), 30.0)],
)
def test_near_the_ideal_after_twenty_steps(slowness, fixed_s):
    """Speeds from 1:1 to 1:8, with fixed time and without, under noise of 2 %; the batch keeps its size."""
    ranks = [Speed(fixed_s, slow) for slow in slowness]
    world = Simulated(ranks, GlobalBatch((48,) * len(ranks)), noise=0.02)
    ratios = [world.step() for _ in range(40)]
    assert ratios[0] > 1.2
    assert max(ratios[20:]) < 1.05
    assert world.batch.size == 48 * len(ranks)
    moved = [0, *(entry["step"] for entry in world.balance.report(world.batch)["history"])]
    assert moved[1] >= 5  # two that are not measured, three that are
    assert all(after - before > 3 for before, after in itertools.pairwise(moved))


def test_equal_ranks_are_left_alone():
    """Also where every step is 5 % longer or shorter than the last."""
    world = Simulated([Speed(5, 1)] * 4, GlobalBatch((32,) * 4), noise=0.05)
    assert max(world.step() for _ in range(200)) < 1.02


@pytest.mark.parametrize(("slowness", "mean", "worst"), [((1, 1, 1, 1), 1.01, 1.1), ((1, 1, 2, 4), 1.1, 1.6)])
def test_noisy_ranks(slowness, mean, worst):
    """Steps that differ by an eighth, as under a CPU quota, neither move equal ranks nor promise what is not there."""
    ratios = []
    for seed in range(4):
        world = Simulated([Speed(0, slow) for slow in slowness], GlobalBatch((384,) * 4), noise=0.12)
        world.source = seeded(f"quota {seed}")
        ratios += [world.step() for _ in range(80)][20:]
    assert sum(ratios) / len(ratios) < mean
    assert max(ratios) < worst


def test_a_throttled_rank_is_followed_within_ten_steps():
    """And again when it recovers."""
    world = Simulated([Speed(2, 1)] * 4, GlobalBatch((32,) * 4), noise=0.01)
    for _ in range(20):
        world.step()
    world.speeds[2] = Speed(2, 1).times(3)
    ratios = [world.step() for _ in range(30)]
    assert ratios[0] > 2
    assert max(ratios[10:]) < 1.1
    world.speeds[2] = Speed(2, 1)
    assert max([world.step() for _ in range(30)][10:]) < 1.1


def test_micro_steps_are_moved():
    """Micro-batches keep their size."""
    world = Simulated(
        [Speed(0, 1), Speed(0, 2), Speed(0, 4)], GlobalBatch((8, 8, 8), accumulation=7), move="micro-steps"
    )
    assert [round(world.step(), 2) for _ in range(12)][-1] == 1.0
    assert world.batch == GlobalBatch((8, 8, 8), accumulation=(12, 6, 3))


def test_limits_are_learnt_from_memory_that_ran_out():
    """Three quarters of what did not fit, for good; the rest goes to the others; no room is an error."""
    balance, batch = Balance(most=(64, 30, 30)), GlobalBatch((32, 16, 16))
    balance.tells = False
    step = StepCut(0, (batch.local,))
    assert balance.out_of_memory(batch, step, [0]) == GlobalBatch((24, 20, 20))
    step = StepCut(0, ((24, 20, 20),))
    with pytest.raises(ConfigurationError, match="rank 1 with 20 samples and rank 2 with 20 samples"):
        balance.out_of_memory(GlobalBatch((24, 20, 20)), step, [1, 2])
    assert balance.report(batch)["limits"] == [24, 15, 15]
    by_steps = Balance(move="micro-steps")
    with pytest.raises(ConfigurationError, match="whose size is fixed"):
        by_steps.out_of_memory(GlobalBatch((8, 8, 8), (2, 1, 1)), StepCut(0, ((8, 8, 8),)), [0])


def test_shares_that_a_user_has_changed_beyond_the_limits_move_back():
    """Though nothing is gained."""
    balance, batch = Balance(most=(20, 10)), GlobalBatch((20, 10))
    balance.tells = False
    assert [balance.observe(batch, [StepWork(20, 2.0), StepWork(10, 1.0)]) for _ in range(6)] == [None] * 6
    changed = GlobalBatch((15, 15))
    assert balance.observe(changed, [StepWork(15, 1.5), StepWork(15, 1.5)]) == batch
    fixed = Balance(move="micro-steps", most=4)
    fixed.begin(GlobalBatch((4, 4), 2))
    with pytest.raises(ConfigurationError, match="make it smaller"):
        fixed.observe(GlobalBatch((8, 8)), [StepWork(8, 1.0), StepWork(8, 1.0)])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Balance(move="ranks"), "give one of 'samples', 'micro-steps'"),
        (lambda: Balance(gain_ratio=1.5), "a fraction of a step"),
        (lambda: Balance(most=(8, 8)).begin(GlobalBatch((4, 4, 4))), "is for 2 ranks"),
        (lambda: Balance().begin(GlobalBatch((4, 4), (2, 1))), "equally many micro-steps"),
        (lambda: Balance(move="micro-steps").begin(GlobalBatch((4, 8))), "the same size on every rank"),
        (lambda: Balance().begin(GlobalBatch((1, 0))), "not enough for every rank"),
        *[
            (lambda most=most: Balance(most=most), "a whole number from 1 on")
            for most in (0, -1, 1.5, "4", True, (4, 0))
        ],
        (
            lambda: Balance(most=(20, 10)).begin(GlobalBatch((14, 14))),
            "rank 1 micro-batches of 14 samples, where .* lets it have 10. Begin with 2 ranks with 18 \\+ 10",
        ),
        (
            lambda: Balance(most=8).begin(GlobalBatch((16, 16))),
            "32 samples cannot be divided among ranks that hold",
        ),
        (lambda: Balance(move="micro-steps", most=8).begin(GlobalBatch((16, 16))), "make it smaller"),
    ],
)
def test_refused(make, words):
    """Before anything is trained."""
    with pytest.raises(ConfigurationError, match=words):
        make()


def test_the_first_step_of_a_size_is_not_measured():
    """It allocates memory, or tunes kernels; nor are the first steps of all."""
    balance, batch = Balance(num_ignored=2), GlobalBatch((4, 4))
    for seconds in (9.0, 9.0, 1.0, 1.0):
        balance.observe(batch, [StepWork(4, seconds)] * 2)
    balance.observe(batch, [StepWork(5, 9.0), StepWork(3, 1.0)])
    balance.observe(batch, [StepWork(5, 1.25), StepWork(3, 0.75)])
    assert balance.report(batch)["predicted_s"] == pytest.approx(1.0)
