"""What `paceline study forward-overlap` derives: the floor, gradients of a given ratio, and sleeps that vary."""

import json
import random
import statistics
from types import SimpleNamespace

import pytest

from harness.figures import RESULTS
from paceline.errors import ConfigurationError
from paceline_lab.bench.layer_profile import LayerTime, Profile
from paceline_lab.bench.ranks import LoopbackRanks
from paceline_lab.experiments.step import forward_overlap_sides
from paceline_lab.experiments.step.forward_overlap import at_ratio, floor_of
from paceline_lab.experiments.step.forward_overlap_floor import Layer, least_step_s, step_without_s
from paceline_lab.experiments.step.forward_overlap_sides import (
    Config,
    SideOutcome,
    Trainee,
    UnevenStopwatch,
    parse_names,
)


class Place(LoopbackRanks):
    def __init__(self, num_ranks, rate_bytes_per_s):
        super().__init__(num_ranks)
        self.rate_bytes_per_s = rate_bytes_per_s


def config(profile=True, **options):
    layers = tuple(LayerTime(str(i), ((1000, 250),), 0.1, 0.2) for i in range(4))
    made = Profile("made", "by hand", layers, 0.05) if profile else None
    return Config("wide_mlp", made, ("torch",), 2, **{"num_steps": 3, **options})


def test_the_floor_is_derived():
    """4 MB among 4 ranks: 6 MB a rank at 0.95 of the rate. The first layer's gradients can hide behind nothing."""
    assert config().num_bytes == 4_000_000
    floor = floor_of(config(), Place(4, 6e6 / 0.95))  # a second on the wire
    assert floor.communication_s == pytest.approx(1.0)
    assert floor.computation_s == pytest.approx(1.25)
    assert floor.least_s == pytest.approx(1.2 + 0.25)  # all of the computation, and the first layer's quarter
    assert floor.without_s == pytest.approx(0.2 + 1.0 + 0.4 + 0.05)
    assert (
        "least 1450 ms: the larger of computation 1250 and communication 1000 ms, and 200 that" in floor.words
    )
    slower = floor_of(config(slow_rank_ratio=1.5), Place(4, 6e6 / 0.95))
    assert slower.computation_s == pytest.approx(1.85)
    assert floor_of(config(), Place(4, None)) is None


def test_real_compute_is_bounded_by_the_larger_of_two():
    alone = SideOutcome("none", [0.3, 0.3], [0.1], [0.3], [0.2], None, None, None, 0.0, ranks_equal=True)
    place = Place(2, 1e9)
    assert floor_of(config(profile=False), place) is None
    floor = floor_of(config(profile=False), place, [alone])
    assert floor.least_s == pytest.approx(0.3)
    assert floor.without_s is None
    assert floor_of(config(profile=False), Place(2, 1e6), [alone]).least_s > 50  # 50 MB


def test_gradients_of_a_ratio():
    """Communication takes so many times as long as backward; what cannot be is refused."""
    place = Place(4, 6e6 / 0.95)
    found = at_ratio(config(), place, 0.5)
    assert found.scale == pytest.approx(2.5)
    assert floor_of(found, place).communication_s == pytest.approx(0.4)
    with pytest.raises(ConfigurationError, match=r"which is 1.25 times backward. Pass a smaller ratio"):
        at_ratio(config(), place, 2.0)
    for where, wrong in ((Place(4, None), config()), (place, config(profile=False))):
        with pytest.raises(ConfigurationError, match="it needs --hosts, --rate and --compute timed"):
            at_ratio(wrong, where, 1.0)


def test_the_first_step_of_a_turn_is_not_in_the_steady_state(monkeypatch):
    """It begins settled. Here it takes 2 s, each later one waits a second more, and settling takes 3 s."""
    clock = 0.0

    def spend(length_s):
        nonlocal clock
        clock += length_s

    trainee = Trainee.__new__(Trainee)
    trainee.steady_s, trainee.first_s, trainee.turn_s, trainee.backward_s = [], [], [], []
    trainee.parallel = SimpleNamespace(step=lambda: None)
    monkeypatch.setattr(forward_overlap_sides.dist, "barrier", lambda: None)
    monkeypatch.setattr(forward_overlap_sides.time, "perf_counter", lambda: clock)
    monkeypatch.setattr(trainee, "settle", lambda: spend(3.0))
    for _ in range(2):
        lengths_s = iter([2.0, 3.0, 3.0, 3.0])
        monkeypatch.setattr(trainee, "_gradients_s", lambda lengths_s=lengths_s: spend(next(lengths_s)))
        trainee.turn(4)
    assert trainee.steady_s == [3.0, 3.0] * 2
    assert trainee.first_s == [2.0] * 2
    assert trainee.turn_s == [14.0 / 4] * 2
    trainee._gradients_s = lambda: spend(9.0)
    trainee.turn(4, timed=False)
    assert len(trainee.steady_s) == 4


def test_what_is_stored_was_summarised_that_way():
    """Results of before were computed again: one first interval a turn, and the medians of the others."""
    files = list(RESULTS.glob("forward_overlap-*.json"))
    assert len(files) > 20
    for file in files:
        record = json.loads(file.read_text())
        num_turns, num_steps = 2 * record["config"]["num_rounds"], record["config"]["num_steps"]
        for side, found in record["samples"].items():
            assert len(found["first_s"]) == len(found["turn_s"]) == num_turns, file.name
            assert len(found["steady_s"]) == num_turns * (num_steps - 2), file.name
            median = record["summaries"]["sides"][side]["steady_s"]["median"]
            assert median == pytest.approx(statistics.median(found["steady_s"])), file.name


def test_sleeps_vary_about_what_was_asked_for():
    slept = []
    watch = UnevenStopwatch(1.5, 0.2, seed=3)
    watch._sleep, watch._now = slept.append, lambda: sum(slept)
    for _ in range(200):
        watch.spend(0.1)
    assert 0.12 <= min(slept) < 0.13
    assert 0.17 < max(slept) <= 0.18
    assert sum(slept) == pytest.approx(30, rel=0.03)
    dice = random.Random(3)
    assert slept[0] == pytest.approx(0.15 * dice.uniform(0.8, 1.2))


def test_refused():
    with pytest.raises(ConfigurationError, match="with --compute real no rank sleeps"):
        config(profile=False, jitter_ratio=0.1)
    with pytest.raises(ConfigurationError, match=r"--jitter 2 is no share"):
        config(jitter_ratio=2)
    with pytest.raises(
        ConfigurationError, match=r"--steps 2 leaves no step in the steady state.*Pass 3 or more"
    ):
        config(num_steps=2)
    assert parse_names("torch, ours-forward") == ("torch", "ours-forward")
    with pytest.raises(ConfigurationError, match="no side called"):
        parse_names("torch,backward")


def test_the_least_time_by_hand():
    """Two layers, 1 s of forward and 2 s of backward each."""
    for below, above, least, without in (
        (1, 1, 7.0, 7.0),  # nothing hides the front layer's, and backward the last layer's
        (
            0,
            8,
            11.0,
            12.0,
        ),  # the last layer's 8 s begin after 2 s of backward and end before its second of forward
        (1, 8, 12.0, 13.0),
        (8, 0, 14.0, 14.0),
    ):
        layers = [Layer(1.0, 2.0, below), Layer(1.0, 2.0, above)]
        assert step_without_s(layers, 0.0, 1.0) == without
        assert least_step_s(layers, 0.0, 1.0) == least
    assert least_step_s([Layer(1.0, 2.0, 0)], 0.5, 1.0) == 3.5
