"""How long communication was under way in a step, from when its buckets were launched and done."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.observe import StepTiming
from paceline.observe.run_records import BucketTiming

INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6)


def step_of(intervals):
    buckets = [
        BucketTiming(index, 4, begin, begin, begin + lasts, 0.0)
        for index, (begin, lasts) in enumerate(intervals)
    ]
    return StepTiming(1, 1.0, 0.0, 10.0, 1.0, tuple(buckets))


@given(INTERVALS)
def test_communication_is_under_way_while_any_bucket_is(intervals):
    covered = {second for begin, lasts in intervals for second in range(begin, begin + lasts)}
    assert step_of(intervals).communication_s == pytest.approx(len(covered))


def test_buckets_that_were_launched_out_of_order_count():
    """Forward overlap sends what is needed first: bucket 1 waits until bucket 2 has been sent."""
    step = step_of([(0, 1), (9, 1), (1, 8)])
    assert step.communication_s == 10
    assert step.overlapped_s == 9  # but for what the step waited
