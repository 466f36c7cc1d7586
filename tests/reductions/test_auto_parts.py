"""Auto's small parts: the profile of a step, waiting in slices, pieces of a bucket, numbers agreed on."""

import math
import random
import statistics

import pytest
import torch
from torch.nn import Parameter

from paceline.comm.collectives import Chain
from paceline.observe import BucketTiming, StepTiming
from paceline.planning import BucketLoad, Rules
from paceline.reductions import Mean, Message
from paceline.reductions.auto.course import Pace
from paceline.reductions.auto.group_decision import GroupDecision, Ledger
from paceline.reductions.auto.measurement import (
    LARGE_SHARE,
    LEAST_BYTES,
    Periods,
    Probe,
    Stopwatch,
    _Times,
    median_profile,
    profile_of,
)


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def test_a_profile_leaves_out_what_launching_took():
    """By hand: two launches of 0.1 s within backward, one of 0.2 s after it; the middle bucket is sparse."""
    clock, cpu = Clock(), Clock()
    stopwatch = Stopwatch(clock, cpu, num_processors=2.0)

    def bucket(index, launched_s):
        return BucketTiming(index, 8, launched_s, launched_s, launched_s + 1, 0.0)

    clock.now_s, cpu.now_s = 10.0, 3.0
    stopwatch.begin_step()
    assert stopwatch.end_step(StepTiming(1, 0.0, 9.0, 0.5, 0.0, ())) is None
    stopwatch.begin_step()
    for index, launched_s, took_s in ((0, 11.0, 0.1), (2, 11.5, 0.1), (3, 12.0, 0.2)):
        clock.now_s = launched_s + took_s
        stopwatch.launched(index, launched_s, 100 + index)
    clock.now_s, cpu.now_s = 14.0, 7.0
    buckets = (bucket(0, 11.0), bucket(1, 11.2), bucket(2, 11.5), bucket(3, 12.0))
    period_s, profile = stopwatch.end_step(StepTiming(2, 0.0, 10.5, 1.5, 2.0, buckets))
    assert period_s == 4.0
    assert profile.backward_end_s == pytest.approx(2.0 - 0.2)
    assert profile.busy_ratio == pytest.approx(0.5)
    assert [load.size_bytes for load in profile.buckets] == [100, 102, 103]
    assert [load.ready_s for load in profile.buckets] == pytest.approx([1.0, 1.4, 1.8])
    stopwatch.begin_step()
    stopwatch.abandon()
    stopwatch.begin_step()
    assert stopwatch.end_step(StepTiming(3, 0.0, 15.0, 1.0, 0.0, ())) is None
    assert profile_of(median_profile([profile] * 3), [100, 102, 103]) == profile
    assert profile.buckets[0] == BucketLoad(1.0, 100)


def test_periods_are_medians():
    periods = Periods()
    for seconds in (1.0, 9.0, 2.0):
        periods.add("x", seconds)
    periods.add(None, 5.0)
    assert periods.medians(["x", None, "y"]) == [2.0, 5.0, 0.0]
    periods.clear()
    assert periods.medians(["x"]) == [0.0]


@pytest.mark.parametrize(("spread", "number"), [(0.02, 40), (0.1, 40), (0.1, 160)])
def test_doubt_is_how_far_the_ratio_of_two_medians_scatters(spread, number):
    """As drawn a thousand times, within half; a few long steps change little; without steps all is in doubt."""
    source = random.Random(0)

    def draw():
        periods = Periods()
        for codec in ("x", None):
            for _ in range(number):
                periods.add(codec, 1.0 + spread * source.gauss(0.0, 1.0))
            periods.add(codec, 5.0)
        with_s, without_s, doubt = periods.comparison("x", None)
        return with_s / without_s, doubt

    ratios, doubts = zip(*(draw() for _ in range(1000)), strict=True)
    assert 0.7 < statistics.median(doubts) / statistics.stdev(ratios) < 1.4
    assert draw()[1] < spread
    assert Periods().comparison("x", None)[2] == math.inf


def test_what_slows_neighbouring_steps_down_slows_both_sides_down():
    """A codec saves a tenth of each step while another program makes the steps of half the comparison twice as long."""
    periods = Periods()
    for codec, seconds in zip(
        [None, "x", "x", None] * 2, [1.0, 0.9, 0.9, 1.0, 2.0, 1.8, 1.8, 2.0], strict=True
    ):
        periods.add(codec, seconds)
    with_s, without_s, doubt = periods.comparison("x", None)
    assert with_s / without_s == pytest.approx(0.9)
    assert doubt < 0.01, "not the spread of each side's steps"


def test_of_several_timings_the_shortest_counts():
    """What disturbs a timing only adds to it."""
    assert _Times([3.0, 1.0, 2.0], [5.0, 4.0], [6.0], [8.0, 7.0]).shortest() == [1.0, 4.0, 6.0, 7.0]


class Slowly:
    """Done after so many slices."""

    def __init__(self, num_slices):
        self.num_slices, self.told = num_slices, []

    def wait(self, timeout_s=None):
        self.told.append(timeout_s)
        self.num_slices = 0 if timeout_s is None else self.num_slices - 1
        return self.num_slices <= 0

    def on_done(self, callback):
        callback()


def test_a_chain_is_waited_for_in_slices():
    """Each link in turn, never longer than the slice; what comes after a link is done when that is."""
    seen, first, second = [], Slowly(2), Slowly(3)

    def stages():
        yield first
        seen.append("between")
        yield second
        seen.append("after")

    chain = Chain(stages())
    assert [chain.wait(0.5) for _ in range(4)] == [False, False, False, True]
    assert seen == ["between", "after"]
    assert all(0 < timeout_s <= 0.5 for timeout_s in first.told + second.told)
    assert chain.wait(0.5)
    assert Chain(iter([Slowly(5)])).wait()
    done = []
    chain.on_done(lambda: done.append(1))
    assert done == [1]


def test_a_step_that_failed_is_no_part_of_a_sample():
    """Of which step the next one's time would tell is not known, so it does not count."""
    decision = GroupDecision(["x"], 2, Pace(num_measured=1), Rules(0.03, 0.01), Ledger(), tell=print)

    def end():
        decision.end_step(StepTiming(1, 0.0, 0.0, 0.0, 0.0, (BucketTiming(0, 8, 0.0, 0.0, 0.0, 0.0),)))
        return decision.course.num_steps

    decision.begin_step()
    assert end() == 1
    decision.begin_step()  # and fails
    decision.begin_step()
    assert (decision.plan.is_sample, end()) == (True, 1)
    decision.begin_step()
    assert (decision.plan.is_sample, end()) == (True, 2)


def message(*shapes):
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.arange(sum(sizes) + 3, dtype=torch.float32)
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    views = [
        flat[start : start + size].view(shape)
        for start, size, shape in zip(starts, sizes, shapes, strict=True)
    ]
    parameters = [Parameter(view.clone()) for view in views]
    return Message(0, True, flat, sum(sizes), views, parameters, None)


def test_a_probe_takes_copies_of_some_gradients():
    """As many of the first as come nearest to an eighth, and the smallest of them; the bucket's own stay."""
    bucket = message((LEAST_BYTES // 8,), (4, 3), (LEAST_BYTES,), (2,))
    total = 4 * bucket.num_gradient_elements
    for total_bytes, num_kept in ((total, 2), (LARGE_SHARE * total, 4)):
        large, small = Probe.of(bucket, total_bytes, {"none": Mean()}, 2, 0.5)._messages
        assert [view.shape for view in large.gradients] == [
            view.shape for view in bucket.gradients[:num_kept]
        ]
        assert all(
            torch.equal(copied, own) for copied, own in zip(large.gradients, bucket.gradients, strict=False)
        )
        assert large.flat.numel() == large.num_gradient_elements
        place = 1 if num_kept == 2 else 3
        assert torch.equal(small.gradients[0], bucket.gradients[place])
        assert small.parameters == [bucket.parameters[place]]
        large.gradients[1].zero_()
        assert large.flat[LEAST_BYTES // 8 : LEAST_BYTES // 8 + 12].abs().sum() == 0
        assert bucket.gradients[1].min() > 0
    matrix = message(
        (64,), (LEAST_BYTES // 128, 64)
    )  # a bias before it: that alone would say nothing of shapes
    large, small = Probe.of(matrix, 1, {"none": Mean()}, 2, 0.5)._messages
    assert [view.shape for view in large.gradients] == [view.shape for view in matrix.gradients]
    assert [view.shape for view in small.gradients] == [(64,)]
    only = message((5, 7))
    large, small = Probe.of(only, 1, {"none": Mean()}, 2, 0.5)._messages
    assert torch.equal(large.flat, only.flat[:35])
    assert torch.equal(small.flat, large.flat)
