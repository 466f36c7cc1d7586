"""The trial of ways to run a step: the plans, step by step, the ways between phases, and how often it is wrong."""

import math
import random

import pytest

from paceline.errors import ConfigurationError
from paceline.planning import Trial, TrialConfig
from paceline.planning.trial import Phase

CONFIG = TrialConfig(gain_ratio=0.02, num_sweeps=2, check_every=3, try_every=12, drift_ratio=0.1)


def steps(trial):
    """Run all planned steps and return them: the candidate, in brackets if the step is not timed."""
    seen = []
    while not trial.is_due:
        plan = trial.plan
        seen.append(plan.candidate if plan.is_timed else [plan.candidate])
        trial.advance()
    assert trial.plan == (trial.in_use, False)
    return seen


def exchange(trial, **step_s):
    """Run all planned steps, then decide by these durations, `none` among them."""
    seen = steps(trial)
    trial.decide([step_s[name or "none"] for name in trial.candidates])
    return seen


def trial_with_x_on():
    trial = Trial(["x", "y"], CONFIG)
    for _ in range(2):
        exchange(trial, none=1.0, x=0.8, y=0.9)
    assert (trial.phase, trial.in_use) == (Phase.SETTLED, "x")
    return trial


def test_a_change_is_seen_twice_before_it_is_made():
    """All in turn, there and back; then the best against none; then it is on, and timed after one step."""
    trial = Trial(["x", "y"], CONFIG)
    assert exchange(trial, none=1.0, x=0.8, y=0.9) == [None, "x", "y", "y", "x", None]
    assert (trial.phase, trial.in_use) == (Phase.CONFIRMING, None)
    assert exchange(trial, none=1.0, x=0.8) == [None, "x", "x", None]
    assert (trial.phase, trial.in_use, trial.num_steps) == (Phase.SETTLED, "x", 10)
    assert steps(trial) == [["x"], "x", "x", "x"]


@pytest.mark.parametrize(("first", "second"), [(0.985, None), (1.1, None), (0.8, 0.985), (0.8, 1.1)], ids=str)
def test_too_small_a_gain_changes_nothing(first, second):
    """At the first or at the second look."""
    trial = Trial(["x"], CONFIG)
    exchange(trial, none=1.0, x=first)
    assert (trial.phase is Phase.SETTLED) == (second is None)
    if second is not None:
        exchange(trial, none=1.0, x=second)
    assert (trial.phase, trial.in_use) == (Phase.SETTLED, None)


def test_another_candidate_has_to_beat_what_is_in_use_twice_too():
    """By as much as that has to beat none; and both, and none, are run for it."""
    for y, confirmed, in_use in ((0.79, None, "x"), (0.7, 0.79, "x"), (0.7, 0.7, "y")):
        trial = trial_with_x_on()
        trial._begin_trying()
        exchange(trial, none=1.0, x=0.8, y=y)
        if confirmed is not None:
            assert exchange(trial, none=1.0, x=0.8, y=confirmed) == [None, "x", "y", "y", "x", None]
        assert (trial.phase, trial.in_use) == (Phase.SETTLED, in_use)


def test_what_saves_nothing_any_more_is_off():
    """When that is seen twice."""
    for confirmed, in_use in ((0.8, "x"), (1.0, None)):
        trial = trial_with_x_on()
        trial._begin_trying()
        exchange(trial, none=1.0, x=1.0, y=1.2)
        exchange(trial, none=1.0, x=confirmed)
        assert (trial.phase, trial.in_use) == (Phase.SETTLED, in_use)


@pytest.mark.parametrize(
    ("factor", "phase"), [(1.09, Phase.SETTLED), (1.11, Phase.TRYING), (0.9, Phase.TRYING)]
)
def test_steps_that_become_longer_or_shorter_are_tried_again(factor, phase):
    """10 % either way, against the first check; what is in use goes on meanwhile."""
    trial = trial_with_x_on()
    exchange(trial, x=0.7)
    exchange(trial, x=0.7 * factor)
    assert (trial.phase, trial.in_use) == (phase, "x")


def test_a_trial_that_was_long_ago_is_repeated():
    """After 12 steps; one that changes nothing makes checks rarer."""
    trial = trial_with_x_on()
    lengths = []
    for _ in range(3):
        while trial.phase is Phase.SETTLED:
            lengths.append(len(exchange(trial, x=0.8)))
        exchange(trial, none=1.0, x=0.8, y=0.9)
    assert lengths == [4] * 3 + [7] * 2 + [13]


def test_a_resumed_candidate_is_in_use_at_once():
    trial = Trial(["x"], CONFIG)
    trial.resume("x")
    assert steps(trial) == [["x"], "x", "x", "x"]


def test_turns_have_steps_to_warm_up():
    """Where another candidate's turn was before."""
    trial = Trial(["x"], TrialConfig(num_sweeps=2, turn_steps=2, warm_up_steps=1))
    assert steps(trial) == [[None], None, None, ["x"], "x", "x", "x", "x", [None], None, None]


def test_medians_count_and_candidates_without_steps_are_run_again():
    trial = Trial(["x"], CONFIG)
    for seconds in (1.0, 9.0, 2.0):
        trial.add("x", seconds)
    assert trial.medians() == [0.0, 2.0]
    planned = steps(trial)
    assert trial.decide(trial.medians()) == {}
    assert (trial.phase, trial.medians()) == (Phase.TRYING, [0.0, 0.0])
    assert steps(trial) == planned


def chosen(source, saved, noise):
    """Return whether a candidate is on that saves so much of steps that vary so much; some are three times as long."""
    trial = Trial(["x"], TrialConfig())
    while trial.phase is not Phase.SETTLED:
        candidate = trial.plan.candidate
        is_long = 3 if source.random() < 0.03 else 1
        true_s = 1 - saved if candidate else 1.0
        trial.add(candidate, true_s * is_long * math.exp(noise * source.gauss(0, 1)))
        trial.advance()
        if trial.is_due:
            trial.decide(trial.medians())
    return trial.in_use == "x"


def test_few_choices_are_wrong():
    """Of 2,000 candidates that save -25 to 40 %, with steps that vary by 10 %: wrong is to cost 5 % of a step."""
    source, num_wrong = random.Random(0), 0
    for _ in range(2000):
        saved = source.uniform(-0.25, 0.4)
        num_wrong += abs(saved) > 0.05 and chosen(source, saved, 0.1) != (saved > 0)
    assert num_wrong < 2000 / 20


@pytest.mark.parametrize(
    "wrong",
    [{"num_sweeps": 0}, {"warm_up_steps": -1}, {"check_every": 0}, {"gain_ratio": 1.0}, {"drift_ratio": 0}],
    ids=str,
)
def test_an_impossible_trial_is_refused(wrong):
    with pytest.raises(ConfigurationError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))}"):
        TrialConfig(**wrong)
