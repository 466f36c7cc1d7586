"""Who is named, and when nobody is; on made runs, whose truth is known."""

from __future__ import annotations

import pytest

from harness.made_runs import MadeRun, always
from paceline.diagnosis.culprit import find_culprit
from paceline.diagnosis.step_table import table_of
from paceline.diagnosis.what_if import without


def culprit_of(made):
    return find_culprit(table_of(made.make()))


@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_named_where_nobody_is_slow(seed):
    assert culprit_of(MadeRun(seed=seed)) is None


@pytest.mark.parametrize("phase", ["optimizer", "loading", "forward", "other", "checkpoint", "garbage"])
@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_is_slow_in_every_step_is_named_with_its_phase(phase, seed):
    found = culprit_of(MadeRun(always(seed, phase, 0.030), seed=seed))
    assert (found.rank, found.phase, found.when) == (seed, phase, "always")
    assert found.delay_s == pytest.approx(0.030, abs=0.004)
    assert found.sureness == 1.0


@pytest.mark.parametrize("layer", ["embed", "body", "head"])
def test_a_slow_layer_of_backward_is_named(layer):
    found = culprit_of(MadeRun(always(2, layer, 0.030)))
    assert (found.rank, found.phase, found.layer) == (2, "backward", layer)


def test_all_that_computes_being_slow_is_no_single_phase():
    found = culprit_of(
        MadeRun(lambda rank, _: dict.fromkeys(("forward", "embed", "body", "head"), 0.01 * (rank == 1)))
    )
    assert (found.rank, found.phase, found.layer) == (1, "computation", "")


def test_a_delay_below_a_twentieth_is_left_unsaid():
    assert culprit_of(MadeRun(always(1, "forward", 0.002), jitter=0.01)) is None
    assert culprit_of(MadeRun(always(1, "forward", 0.005), jitter=0.01)).rank == 1


def test_what_others_prolong_is_not_held_against_a_rank():
    """All ranks' steps take as long as the slowest one's; only its own work is longer."""
    table = table_of(MadeRun(always(3, "body", 0.060)).make())
    assert table.rows[0][0].step_s == pytest.approx(table.rows[0][3].step_s)
    assert find_culprit(table).rank == 3


def test_an_onset_is_found_to_the_step():
    found = culprit_of(MadeRun(lambda rank, step: {"forward": 0.06} if rank == 1 and step >= 25 else {}))
    assert (found.rank, found.when, found.since_step) == (1, "since", 25)


@pytest.mark.parametrize("seed", range(5))
def test_an_onset_in_the_first_half_is_found_to_the_step(seed):
    """The median of what follows an earlier step is as large, so medians alone place it anywhere before."""

    def extra(rank, step):
        return {"loading": 0.064 if step >= 30 else 0.001} if rank == 2 else {}

    found = culprit_of(MadeRun(extra, num_steps=100, seed=seed, jitter=0.02))
    assert (found.rank, found.when, found.since_step) == (2, "since", 30)


def test_an_onset_is_found_within_twenty_steps_of_a_long_run():
    made = MadeRun(lambda rank, step: {"forward": 0.06} if rank == 1 and step > 180 else {}, num_steps=200)
    found = culprit_of(made)
    assert (found.rank, found.when) == (1, "since")


def test_a_periodic_event_is_no_constant_delay():
    found = culprit_of(MadeRun(lambda rank, step: {"optimizer": 0.3} if rank == 0 and step % 8 == 0 else {}))
    assert (found.rank, found.phase, found.when, found.every) == (0, "optimizer", "periodic", 8)


def test_checkpoints_without_a_period_are_told():
    steps = {9, 14, 30}
    found = culprit_of(MadeRun(lambda rank, step: {"checkpoint": 0.4} if rank == 2 and step in steps else {}))
    assert (found.rank, found.phase, found.when) == (2, "checkpoint", "at times")


def test_a_checkpoint_is_told_among_hiccups_of_others():
    def extra(rank, step):
        hiccup = {"forward": 0.15} if rank == step % 4 and step % 3 == 0 else {}
        return {"checkpoint": 0.2} if rank == 2 and step in {10, 20, 31} else hiccup

    found = culprit_of(MadeRun(extra))
    assert (found.rank, found.phase) == (2, "checkpoint")


def test_two_hiccups_of_one_rank_are_chance():
    assert (
        culprit_of(MadeRun(lambda rank, step: {"forward": 0.4} if rank == 2 and step in {9, 14} else {}))
        is None
    )


def test_a_culprit_that_moves_is_no_rank():
    found = culprit_of(MadeRun(lambda rank, step: {"body": 0.06} if rank == step // 3 % 4 else {}))
    assert (found.rank, found.phase, found.when) == (None, "backward", "moving")


def test_one_long_step_makes_nobody_guilty():
    assert culprit_of(MadeRun(lambda rank, step: {"other": 30.0} if rank == 1 and step == 20 else {})) is None


def test_a_dozen_steps_and_two_ranks_are_needed():
    assert culprit_of(MadeRun(always(1, "forward", 0.1), num_steps=14)) is None  # of which 11 count
    assert culprit_of(MadeRun(always(1, "forward", 0.1), num_steps=15)).rank == 1
    assert culprit_of(MadeRun(always(0, "forward", 0.1), num_ranks=1)) is None


def test_times_at_a_runs_beginning_do_not_count():
    assert culprit_of(MadeRun(lambda rank, step: {"forward": 5.0} if rank == 1 and step < 4 else {})) is None


@pytest.mark.parametrize("phase", ["forward", "body", "loading", "optimizer"])
def test_the_step_without_the_culprit_is_the_step_of_a_run_without_it(phase):
    slow, clean = (
        table_of(MadeRun(x, num_steps=200).make()) for x in (always(1, phase, 0.06), always(1, phase, 0.0))
    )
    predicted = without(slow, find_culprit(slow))
    assert predicted.step_s == pytest.approx(clean.step_s, rel=0.02)
    assert predicted.low_s <= predicted.step_s <= predicted.high_s
    assert slow.step_s > 1.5 * clean.step_s


def test_the_mean_step_without_a_periodic_culprit():
    def extra(rank, step):
        return {"optimizer": 0.3} if rank == 0 and step % 8 == 0 else {}

    slow, clean = (table_of(MadeRun(x, num_steps=200).make()) for x in (extra, lambda *_: {}))
    predicted = without(slow, find_culprit(slow))
    assert predicted.mean_s == pytest.approx(sum(clean.steps_s) / len(clean), rel=0.02)


def test_waiting_within_a_forward_is_no_work():
    """Three ranks wait in their forwards for buffers of rank 0, which loads slowly: it is the one to be named."""
    from dataclasses import replace

    from paceline.observe.run_records import Interval

    run = MadeRun(lambda rank, _: {"loading": 0.05} if rank == 0 else {"forward": 0.05}).make()
    for rank in run.ranks[1:]:
        for i, step in enumerate(rank.steps):
            forward = next(x for x in step.intervals if x.phase == "forward")
            waiting = Interval("waiting", forward.start_s, forward.start_s + 0.05)
            rank.steps[i] = replace(step, intervals=(*step.intervals, waiting))
    found = find_culprit(table_of(run))
    assert (found.rank, found.phase) == (0, "loading")
