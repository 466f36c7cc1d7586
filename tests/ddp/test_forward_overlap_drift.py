"""A link changes its rate in the middle of a training: forward overlap plans anew, is tried anew, and comes back.

Steps are simulated: the ranks decide by timings of a link of which the test knows the rate.
"""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from harness.ranks import pool
from paceline.comm.peers import Peers
from paceline.ddp.forward_overlap.agreement import Agreement
from paceline.observe import BucketTiming, StepTiming, StepTimings
from paceline.planning.forward_overlap import MeasuredStep, arrivals, cut, plan, predict

pytestmark = pytest.mark.processes

BACKWARD_S, FORWARD_S, NUM_BUCKETS, BUCKET_BYTES = 0.6, 0.3, 24, 4 * 2**20
CHANGES, CHANGES_BACK, STEPS = 101, 300, 450
NORMAL, FAST, SLOW = 0.9, 0.09, 1.8  # seconds that all gradients take
FOLLOWS_STEPS = 24


@dataclass
class Parameter:
    bucket: int
    dtype: torch.dtype = torch.float32


@dataclass
class Bucket:
    parameters: list
    size_bytes: int = BUCKET_BYTES


class Needs:
    """The last bucket is of the front layers."""

    waited_s = 0.0

    def of(self, parameters, otherwise_s):
        return otherwise_s * (NUM_BUCKETS - 1 - parameters[0].bucket) / NUM_BUCKETS


def step_at(communication_s):
    ready_s = tuple(BACKWARD_S * (i + 1) / NUM_BUCKETS for i in range(NUM_BUCKETS))
    needed_s = tuple(Needs().of([Parameter(i)], FORWARD_S) for i in range(NUM_BUCKETS))
    rate = NUM_BUCKETS * BUCKET_BYTES / communication_s
    return MeasuredStep(ready_s, needed_s, BACKWARD_S, FORWARD_S, 1e9, rate)


def lengths(rank, num_ranks, communication_s):
    """Each step of a training: whether it was deferred, how long it took, and how long with a plan for its link."""
    agreement = Agreement(
        dist.group.WORLD, Peers(dist.group.WORLD, "drift", in_slices=False), is_forced=False
    )
    buckets = [Bucket([Parameter(i)]) for i in range(NUM_BUCKETS)]
    pieces = cut([BUCKET_BYTES // 4] * NUM_BUCKETS, [4] * NUM_BUCKETS)
    timings, now_s, steps, verdicts = StepTimings(), 0.0, [], {}
    for number in range(STEPS):
        step = step_at(communication_s(number))
        is_put_off = agreement.defers(buckets, number, timings, FORWARD_S, Needs())
        verdicts.setdefault(agreement.verdict, number)
        order = (
            [pieces.index(piece) for piece in agreement.pieces] if is_put_off else list(range(len(pieces)))
        )
        done_s = arrivals(pieces, order, step, step.rate_bytes_per_s)
        gain = predict(pieces, order, step)
        took_s = gain.with_s if is_put_off else max(BACKWARD_S, *done_s) + FORWARD_S
        timings.add(timing(number, now_s, step, done_s, order))
        now_s += took_s
        steps.append((is_put_off, took_s, predict(pieces, plan(pieces, step), step).with_s))
    return steps, agreement.is_on, verdicts


def timing(number, now_s, step, done_s, order):
    launched_s, before_s = [0.0] * NUM_BUCKETS, 0.0
    for bucket in order:  # a bucket is a piece
        launched_s[bucket] = max(before_s, step.ready_s[bucket])
        before_s = done_s[bucket]
    buckets = tuple(
        BucketTiming(i, BUCKET_BYTES, now_s + step.ready_s[i], now_s + launched_s[i], now_s + done_s[i], 0.0)
        for i in range(NUM_BUCKETS)
    )
    return StepTiming(number + 1, FORWARD_S, now_s, BACKWARD_S, max(0.0, max(done_s) - BACKWARD_S), buckets)


def halves(number):
    return NORMAL if number < CHANGES else SLOW


def is_fast_for_a_while(number):
    return FAST if CHANGES <= number < CHANGES_BACK else SLOW


def is_steady(number):
    return NORMAL


def test_the_plan_follows_a_link_whose_rate_halves():
    first, second = pool(2).run(lengths, halves)
    assert first == second
    steps, is_on, _ = first
    assert is_on
    deferred, took_s, planned_s = zip(*steps, strict=True)
    assert took_s[CHANGES] > 1.01 * planned_s[CHANGES]  # the old order is not the right one
    after = CHANGES + FOLLOWS_STEPS
    assert took_s[after] == planned_s[after]
    assert deferred[-1]


def test_it_is_off_while_nothing_can_be_gained_and_comes_back():
    steps, is_on, verdicts = pool(2).run(lengths, is_fast_for_a_while)[0]
    deferred = [each[0] for each in steps]
    assert is_on
    assert deferred[CHANGES - 1]
    assert not deferred[CHANGES_BACK - 1]
    assert deferred[-1]
    words = [verdict.partition(":")[0].partition(";")[0] for verdict in verdicts]
    again = "on, to be tried again"
    off = "off until steps take longer or shorter, because it saves nothing"
    assert words == ["", "on, to be tried in turns", "on", again, off]  # then with the same words as before
    assert next(number for text, number in verdicts.items() if text.startswith(off)) < CHANGES_BACK


def test_a_steady_link_is_tried_once():
    """Three steps are measured; then turns of 8 steps, without, with, with and without the overlap."""
    steps, is_on, verdicts = pool(2).run(lengths, is_steady)[0]
    assert is_on
    assert [number for number, (is_put_off, *_) in enumerate(steps) if not is_put_off] == [
        *range(11),
        *range(27, 35),
    ]
    assert list(verdicts.values()) == [0, 3, 35]
    measuring, tried, kept = verdicts
    assert measuring == ""
    assert tried.startswith("on, to be tried in turns; predicted to save ")
    assert kept.startswith("on: measured, it saves ")
    assert kept.endswith(" without)")
