"""What Auto does in which step: the plans, step by step, and the ways from one phase to the next."""

import math
import random

import pytest

from paceline.errors import ConfigurationError
from paceline.planning import Rules
from paceline.reductions.auto.course import Course, Pace, Phase, Question
from paceline.reductions.auto.measurement import Periods

PACE = Pace(num_measured=2, num_tried=4, check_every=5, try_every=12, drift_ratio=0.1)


def course():
    return Course(PACE, Rules(0.03, 0.01))


def steps(course, number):
    """Go so many steps; what each was."""
    seen = []
    for _ in range(number):
        plan = course.plan()
        seen.append((plan.codec, plan.is_sample, plan.question))
        course.step()
    return seen


def quiet(codec, is_sample):
    return (codec, is_sample, Question.NOTHING)


def tried(with_s=0.5):
    """A course whose codec was tried and took `with_s` instead of 1 s a step."""
    one = course()
    steps(one, 4)
    one.decided("x")
    steps(one, 6)
    one.tried_out(with_s, 1.0)
    return one


@pytest.mark.parametrize(
    ("with_s", "doubt", "num_rounds"),
    [(0.5, 0.1, 1), (1.5, 0.1, 1), (0.97, 0.001, 1), (0.97, 0.02, 6), (1.02, 0.02, 6), (0.5, math.inf, 6)],
)
def test_a_comparison_goes_on_while_steps_vary_too_much(with_s, doubt, num_rounds):
    """In rounds of the same steps, at most six; what is saved, or lost, beyond doubt needs one."""
    one = course()
    steps(one, 4)
    one.decided("x", "y")
    first = steps(one, 6)
    for _ in range(num_rounds - 1):
        assert one.tries_longer(with_s, 1.0, doubt)
        assert (one.phase, one.tried) == (Phase.TRYING, "x")
        assert steps(one, 6) == first
    assert not one.tries_longer(with_s, 1.0, doubt)
    one.tried_out(with_s, 1.0)
    assert one.tried == "y"
    steps(one, 6)
    assert one.tries_longer(1.0, 1.0, 0.1), "another comparison has its own rounds"


def compared(source, saved, noise, may_try_longer):
    """Whether a codec that saves so much of steps that vary so much comes to be on."""
    one, periods = Course(Pace(), Rules(0.03, 0.01)), Periods()
    steps(one, 6)
    one.decided("x")
    while True:
        plan = one.plan()
        if plan.is_sample:
            is_long = 3 if source.random() < 0.03 else 1
            true_s = 1 - saved if plan.codec else 1.0
            periods.add(plan.codec, true_s * is_long * math.exp(noise * source.gauss(0, 1)))
        one.step()
        if plan.question is Question.PERIODS:
            with_s, without_s, doubt = periods.comparison("x", None)
            if not (may_try_longer and one.tries_longer(with_s, without_s, doubt)):
                return one.tried_out(with_s, without_s)


def test_more_rounds_make_fewer_wrong_choices():
    """Of 2,000 codecs that save -25 to 40 %, with steps that vary by 10 %: wrong is to cost 5 % of a step."""
    num_wrong = {}
    for may_try_longer in (False, True):
        source = random.Random(0)
        num_wrong[may_try_longer] = 0
        for _ in range(2000):
            saved = source.uniform(-0.25, 0.4)
            is_on = compared(source, saved, 0.1, may_try_longer)
            num_wrong[may_try_longer] += abs(saved) > 0.05 and is_on != (saved > 0)
    assert num_wrong[True] < num_wrong[False] / 2
    assert num_wrong[True] < 2000 / 50


def test_measure_then_try_then_settle():
    """One step apart, two samples, a question; one step with the codec, without, with, with, without, a question."""
    one = course()
    first, sample = quiet(None, is_sample=False), quiet(None, is_sample=True)
    assert steps(one, 4) == [first, sample, sample, (None, False, Question.COSTS)]
    one.decided("x")
    coded = quiet("x", is_sample=True)
    assert steps(one, 6) == [
        quiet("x", is_sample=False),
        sample,
        coded,
        coded,
        sample,
        (None, False, Question.PERIODS),
    ]
    assert one.tried_out(0.5, 1.0)
    assert (one.phase, one.in_use, one.tried) == (Phase.SETTLED, "x", None)
    assert steps(one, 5) == [
        quiet("x", is_sample=False),
        *[quiet("x", is_sample=True)] * 3,
        ("x", False, Question.PERIODS),
    ]


def test_nothing_to_gain():
    """Settled at once, without a codec."""
    one = course()
    steps(one, 4)
    one.decided(None)
    assert (one.phase, one.in_use) == (Phase.SETTLED, None)


def test_reality_disagrees():
    """Off and barred for twice the time between checks; measured again then, and barred for twice as long."""
    one = tried(with_s=0.995)
    for num_checks in (2, 4):
        assert (one.in_use, one.barred()) == (None, {"x"})
        for _ in range(num_checks):
            assert one.phase is Phase.SETTLED
            steps(one, 5)
            one.checked(1.0)
        assert (one.phase, one.barred()) == (Phase.MEASURING, set())
        steps(one, 4)
        one.decided("x")
        steps(one, 6)
        assert not one.tried_out(1.2, 1.0)
    steps(one, 39)
    assert one.barred() == {"x"}
    steps(one, 1)
    assert not one.barred()


def test_a_drift_is_measured_again():
    """10 % either way, against the first check; what is in use goes on meanwhile."""
    for factor, phase in (
        (1.09, Phase.SETTLED),
        (0.93, Phase.SETTLED),
        (1.11, Phase.MEASURING),
        (0.9, Phase.MEASURING),
    ):
        one = tried()
        steps(one, 5)
        one.checked(0.7)
        steps(one, 5)
        one.checked(0.7 * factor)
        assert (one.phase, one.in_use) == (phase, "x")


def test_a_fruitless_measurement_makes_checks_rarer():
    """Twice as many steps to the next one; a change brings the old pace back."""
    one = tried()
    for num_steps in (5, 10, 20):
        steps(one, num_steps)
        one.checked(1.0)
        one._enter(Phase.MEASURING)
        steps(one, 4)
        one.decided("x")
        assert [plan[2] for plan in steps(one, 2 * num_steps)][-1] is Question.PERIODS
        one._enter(Phase.SETTLED)
    one._enter(Phase.MEASURING)
    steps(one, 4)
    one.decided("y")
    steps(one, 6)
    one.tried_out(0.5, 1.0)
    assert [plan[2] for plan in steps(one, 5)][-1] is Question.PERIODS


def test_what_is_on_is_compared_again():
    """After 12 steps, with plain steps; and off if it does not pay any more."""
    one = tried()
    for _ in range(3):
        steps(one, 5)
        one.checked(1.0)
    assert (one.phase, one.tried) == (Phase.TRYING, "x")
    assert [codec for codec, _, _ in steps(one, 6)] == ["x", None, "x", "x", None, None]
    assert not one.tried_out(1.0, 1.0)
    assert one.in_use is None


def test_with_none_on_all_is_measured_again():
    """After 12 steps: what changed before the first check of settled steps is no drift from it."""
    one = course()
    steps(one, 4)
    one.decided(None)
    for _ in range(2):
        steps(one, 5)
        one.checked(9.0)
        assert one.phase is Phase.SETTLED
    steps(one, 5)
    one.checked(9.0)
    assert one.phase is Phase.MEASURING


def test_another_codec_is_tried_against_the_one_in_use():
    one = tried()
    one._enter(Phase.MEASURING)
    steps(one, 4)
    one.decided("y")
    assert [codec for codec, _, _ in steps(one, 6)] == ["y", "x", "y", "y", "x", "x"]
    one.tried_out(1.0, 1.0)
    assert (one.in_use, one.barred()) == ("x", {"y"})


def test_the_runner_up_is_tried_against_the_winner():
    """Whether the first one won or not; then settled."""
    for with_s, winner in ((0.5, "x"), (1.0, None)):
        one = course()
        steps(one, 4)
        one.decided("x", "y")
        steps(one, 6)
        one.tried_out(with_s, 1.0)
        assert (one.phase, one.in_use, one.tried) == (Phase.TRYING, winner, "y")
        assert [codec for codec, _, _ in steps(one, 6)] == ["y", winner, "y", "y", winner, winner]
        one.tried_out(0.4, 0.5)
        assert (one.phase, one.in_use, one.tried) == (Phase.SETTLED, "y", None)


def test_a_prediction_turns_off_without_a_trial():
    one = tried()
    one._enter(Phase.MEASURING)
    steps(one, 4)
    one.decided(None)
    assert (one.phase, one.in_use) == (Phase.SETTLED, None)


def test_resuming_asks_first():
    """One plain step with the question; on if all agree, measured afresh if not."""
    for agrees, phase, in_use in ((True, Phase.SETTLED, "x"), (False, Phase.MEASURING, None)):
        one = course()
        one.resume()
        assert steps(one, 1) == [(None, False, Question.RESUMED)]
        one.resumed("x", agrees)
        assert (one.phase, one.in_use) == (phase, in_use)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_measured": 0},
        {"num_tried": 6},
        {"num_tried": 0},
        {"check_every": 2},
        {"try_every": 4},
        {"drift_ratio": 0},
    ],
)
def test_an_impossible_pace_is_refused(wrong):
    with pytest.raises(ConfigurationError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))}"):
        Pace(**wrong)
