"""Remedies for communication that backward does not hide, with predicted steps, and how the next run scores them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness import made_runs
from harness.made_runs import LAYERS, MadeRun
from paceline.diagnosis import diagnose
from paceline.diagnosis.remedies import scored
from paceline.observe.run_records import BucketTiming
from paceline.planning.replay import AlphaBetaCost

MIB = 2**20


def waiting(cost, sizes, jitter=0.0):
    """Steps of Paceline's reducer: buckets of layers or parts of them, one after another over a link of this cost."""
    run = MadeRun(headers={"wrapper": "paceline"}, jitter=jitter, num_steps=24).make()
    for rank in run.ranks:
        at_s = rank.steps[0].began_s
        for i, step in enumerate(rank.steps):
            moved_s = at_s - step.began_s
            marks = [at + moved_s for _, at in step.gradients]
            free_s, buckets = 0.0, []
            for index, size in enumerate(sizes):
                ready_s = marks[min(len(marks) - 1, index * len(marks) // len(sizes))]
                launched_s = max(ready_s, free_s)
                free_s = launched_s + cost.of(size)
                buckets.append(BucketTiming(index, size, ready_s, ready_s, free_s, 0.0))
            intervals = [
                replace(x, start_s=x.start_s + moved_s, end_s=x.end_s + moved_s) for x in step.intervals
            ]
            ended_s = max(free_s, marks[-1])
            rank.steps[i] = replace(
                step,
                began_s=at_s,
                work_ended_s=marks[-1],
                ended_s=ended_s,
                intervals=(*intervals[:-1], replace(intervals[-1], end_s=ended_s)),
                buckets=tuple(buckets),
                gradients=(),
            )
            at_s = ended_s
        rank.labels = LAYERS
    return run


def test_forward_overlap_is_named_with_the_step_that_the_formula_gives():
    found = diagnose(waiting(AlphaBetaCost(0.0, 0.03 / MIB), [MIB] * 3))
    assert found.finding is None
    remedies = {x.words: x.predicted.step_s for x in found.remedies}
    # Buckets of 30 ms are ready at 10, 20 and 32 ms of backward: all are there at 100, or with half the bytes at 55.
    now_s = 0.022 + 0.100
    assert found.step_s == pytest.approx(now_s, abs=0.001)
    assert remedies['pass compression="bf16"'] == pytest.approx(now_s - 0.045, abs=0.002)
    # Forward begins when its first layer's bucket is there, at 70 ms. After 6 of 16 ms it waits until 100.
    assert remedies["pass overlap_forward=True"] == pytest.approx(0.006 + 0.100 + 0.010, abs=0.003)
    assert "Each step waits " in found.words
    assert "overlap_forward=True (predicted " in found.words


def test_small_buckets_are_told_how_large_to_be():
    """40 buckets of 2 ms each, whatever their size: in one they would take 2 ms."""
    found = diagnose(waiting(AlphaBetaCost(0.002, 0.0), [64 * 1024, 32 * 1024] * 20)).finding
    assert found.cause == "buckets too small"
    best = found.remedies[0]
    assert best.words.startswith("pass bucket_cap_mb=")
    assert best.predicted.step_s < found.step_s - 0.04
    assert "Pass bucket_cap_mb=" in found.sentence
    assert "not predicted" not in found.sentence


def test_where_nothing_gains_enough_it_says_so():
    """Buckets that are alike do not say what of their time is latency, and a short forward hides little of 150 ms."""
    found = diagnose(waiting(AlphaBetaCost(0.05, 0.0), [1024] * 3))
    assert found.words.endswith("hide. Leave it so: nothing is predicted to gain 3%.")


def test_of_torchs_reducer_nothing_is_predicted(monkeypatch):
    monkeypatch.setattr(made_runs, "EXPOSED_S", 0.05)
    (remedy,) = diagnose(MadeRun().make()).remedies
    assert remedy.predicted is None
    assert "overlap_forward=True" in remedy.words


def test_the_next_run_scores_what_was_predicted():
    before = diagnose(waiting(AlphaBetaCost(0.0, 0.03 / MIB), [MIB] * 3))
    after = diagnose(waiting(AlphaBetaCost(0.0, 0.015 / MIB), [MIB] * 3))
    first, *lines = scored(before, after)
    assert first == "A step takes 77 ms, and 122 ms in the run before."
    assert 'Pass compression="bf16": predicted 77 ms, +0.0% from this run\'s step.' in lines
    assert scored(before, diagnose(MadeRun(num_ranks=0).make())) == ()
