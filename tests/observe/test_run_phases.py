"""A step's phases add up, however they lie within each other."""

import pytest

from paceline.observe.run_records import Interval, StepRecord


@pytest.mark.parametrize(
    "garbage",
    [(0.11, 0.12), (0.31, 0.32), (0.25, 0.35)],
    ids=["within forward", "within a record", "across both"],
)
def test_phases_add_up_to_the_step(garbage):
    """Garbage is collected within a record that is written within forward: the time counts once, as garbage."""
    step = StepRecord(
        step=1,
        began_s=0.0,
        work_ended_s=0.5,
        ended_s=0.7,
        intervals=(
            Interval("recording", 0.3, 0.4),
            Interval("garbage", *garbage),
            Interval("forward", 0.1, 0.5),
        ),
    )
    phases = step.phases_s()
    assert sum(phases.values()) == pytest.approx(0.7)
    assert phases["garbage"] == pytest.approx(garbage[1] - garbage[0])
    assert phases["waiting"] == pytest.approx(0.2)
    assert phases["other"] == pytest.approx(0.1)


def test_a_step_without_time_between_its_phases_adds_up():
    """Nothing is left that could hide what was counted twice."""
    recording, garbage = Interval("recording", 0.0, 0.1), Interval("garbage", 0.02, 0.05)
    step = StepRecord(
        step=1,
        began_s=0.0,
        work_ended_s=0.5,
        ended_s=0.5,
        intervals=(garbage, recording, Interval("forward", 0.1, 0.5)),
    )
    phases = step.phases_s()
    assert sum(phases.values()) == pytest.approx(0.5)
    assert phases["recording"] == pytest.approx(0.07)
