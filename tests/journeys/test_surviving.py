"""Ranks die at every moment of a training, and the others train what all would have: no sample lost, none doubled.

The trainings and what is asked of them are the laboratory's (`paceline study survival`).
"""

import math
import sys
from pathlib import Path

import pytest

from harness import warm
from paceline_lab.experiments.survival.job import Job, problems, run_job
from paceline_lab.experiments.survival.training import MOMENTS, Fault


def survive(folder, *faults, is_warm=True, rounding=1e-9, **job):
    """Run a job in which these faults happen; nothing that must hold may be broken."""
    python = str(warm.folder() / "python") if is_warm else sys.executable
    asked = Job(faults=tuple(map(Fault.parse, faults)), python=python, **{"limit_s": 90.0, **job})
    outcome = run_job(asked, Path(folder))
    found = problems(asked, outcome, rounding=rounding)
    assert not found, f"{found}\n{outcome.said}"
    return outcome


@pytest.mark.processes
def test_ranks_die_within_steps_between_them_and_while_others_take_their_places(tmp_path):
    """Four ranks, AdamW and a schedule: in forward, as others recover from that, behind an optimizer's step."""
    faults = ["1:3:forward:SIGKILL", "0:3:recovery:SIGKILL", "1:12:optimizer:SIGKILL"]
    outcome = survive(tmp_path, *faults, options=("--epochs", "3", "--optimizer", "adamw"))
    lost = [each for each in max((end["history"] for end in outcome.ends), key=len) if each["lost"]]
    assert all(change["stalled_s"] < 60 for change in lost)
    assert [len(change["lost"]) for change in lost] == [2, 1]  # the second one before the others had gone on
    assert lost[0]["samples_moved"] == 12
    assert "was killed by SIGKILL" in outcome.said


@pytest.mark.processes
def test_the_last_ranks_wait_for_a_replacement_that_receives_their_state(tmp_path):
    """Two of two are needed: training goes on when the second is there again, over shared memory alone."""
    options = ("--epochs", "2", "--backend", "paceline")
    outcome = survive(tmp_path, "1:4:within bucket 2:exit", num_ranks=2, min_ranks=2, options=options)
    assert "1 rank(s) are left of at least 2 (--min-ranks)" in outcome.said
    assert len(outcome.ends) == 2
    (change,) = outcome.ends[0]["history"]
    assert (change["lost"], change["num_new"], change["samples_moved"]) == ([1], 1, 12)  # the half of a step


@pytest.mark.processes
def test_residuals_and_synchronized_batch_normalisation_survive_a_loss(tmp_path):
    """A rank raises where the others wait for it in forward. They stay equal in bits; the residuals it had are lost."""
    options = ("--compression", "topk", "--normalize", "--sync-batch-norm", "--samples", "200")
    survive(tmp_path, "1:4:forward:error", num_ranks=3, options=options, rounding=math.inf)


@pytest.mark.lab
@pytest.mark.processes
@pytest.mark.parametrize(
    ("options", "rounding"),
    [
        (("--compression", "bf16", "--dtype", "float32"), 3e-3),
        (("--compression", "powersgd"), math.inf),
        (("--compression", "auto"), math.inf),
        (("--wrapped", '{"reduction": "adasum"}'), math.inf),
        (("--wrapped", '{"balance": "auto"}'), 1e-9),
        (("--wrapped", '{"skip_all_reduce_unused_params": true}'), 1e-9),
    ],
    ids=str,
)
def test_options_follow_a_loss_and_a_replacement(tmp_path, options, rounding):
    """A rank is lost within bucket 2, and another comes while the others train."""
    options = ("--epochs", "6", "--pause-ms", "50", *options)
    outcome = survive(
        tmp_path, "1:4:within bucket 2:SIGKILL", num_ranks=3, options=options, rounding=rounding
    )
    assert any(change["num_new"] for change in outcome.changes)


@pytest.mark.processes
@pytest.mark.parametrize(("optimizer", "more"), [("sgd", ()), ("adamw", ("--ordinary",))])
def test_fewer_and_more_ranks_end_in_the_bits_of_one_process_that_folds_four_parts(tmp_path, optimizer, more):
    """Two of four die in one step, replacements come, one dies again; with micro-steps and schedules.

    Once with epochs from the sampler's on, once with `range(epochs)`: a replacement had trained epochs of its own.
    """
    options = ("--epochs", "6", "--pause-ms", "20", "--deterministic", "--optimizer", optimizer, *more)
    faults = ["1:3:forward:SIGKILL", "3:3:backward:SIGKILL", "0:30:optimizer:SIGKILL"]
    outcome = survive(tmp_path, *faults, options=options, rounding=0.0)
    sizes = [change["size"] for change in outcome.ends[0]["history"]]
    assert min(sizes) < 4 == max(sizes)


@pytest.mark.processes
def test_an_error_that_all_ranks_raise_ends_the_launch(tmp_path):
    """Nobody is left who could go on: it ends, says so, and leaves nothing behind."""
    job = Job(
        num_ranks=2,
        min_ranks=1,
        faults=(
            Fault(0, 4, "forward", "error"),
            Fault(1, 4, "forward", "error"),
            Fault(0, 4, "forward", "error"),
        ),
        python=str(warm.folder() / "python"),
    )
    outcome = run_job(job, tmp_path)
    assert outcome.code == 1
    assert outcome.num_left == 0
    assert "were lost, and with them what they had trained" in outcome.said
    assert "a fault that was asked for" in outcome.said


@pytest.mark.lab
@pytest.mark.processes
@pytest.mark.parametrize("how", ["SIGKILL", "exit", "error"])
@pytest.mark.parametrize("moment", [moment for moment in MOMENTS if moment != "constructing"])
def test_a_rank_dies_at_each_moment(tmp_path, moment, how):
    """Rank 0 and another, of four; while others recover, a second one."""
    step = 8 if moment == "end of epoch" else 5
    first = [] if moment not in ("recovery", "following") else ["1:5:forward:SIGKILL"]
    for rank in (0, 2):
        folder = tmp_path / str(rank)
        folder.mkdir()
        survive(folder, *first, f"{rank}:{step}:{moment}:{how}", options=("--epochs", "3"))


@pytest.mark.lab
@pytest.mark.processes
def test_a_rank_dies_before_training_begins(tmp_path):
    """The launch ends as without --min-ranks: a script without Elastic could have trained by then."""
    python = str(warm.folder() / "python")
    job = Job(faults=(Fault(2, 0, "constructing", "SIGKILL"),), python=python, limit_s=90.0)
    outcome = run_job(job, tmp_path)
    assert (outcome.code, outcome.num_left) == (1, 0)
    assert "was killed by SIGKILL" in outcome.said
    assert "before the ranks had met in paceline.Elastic" in outcome.said


@pytest.mark.lab
@pytest.mark.processes
@pytest.mark.timeout(400)  # interpreters of its own: the process that is stopped has to be the rank's
def test_a_stopped_rank_is_excluded_and_replaced(tmp_path):
    """It would wake with an old epoch; it is killed instead."""
    outcome = survive(
        tmp_path,
        "1:5:forward:SIGSTOP",
        is_warm=False,
        options=("--epochs", "3"),
        lost_after_s=20.0,
        limit_s=360.0,
    )
    assert "was stopped for 2" in outcome.said


@pytest.mark.lab
@pytest.mark.processes
def test_ranks_with_workers_and_dropout_and_batch_norm_stay_equal(tmp_path):
    """What depends on the cut is not compared with one process; the ranks are with each other.

    In the last epoch the kernel kills a worker: its rank raises, and is lost.
    """
    options = ("--epochs", "4", "--workers", "1", "--dropout", "0.1", "--normalize", "--pause-ms", "20")
    options += ("--samples", "200")  # batch normalisation needs two samples a rank
    job = Job(
        faults=(
            Fault(0, 5, "forward", "SIGKILL"),
            Fault(1, 14, "backward", "SIGKILL"),
            Fault(1, 26, "loading", "SIGKILL"),  # of a worker, which begins with the step before
        ),
        options=options,
        python=str(warm.folder() / "python"),
    )
    outcome = run_job(job, tmp_path)
    assert not problems(job, outcome, rounding=math.inf), outcome.said
    assert "DataLoader worker" in outcome.said
    assert sum(len(change["lost"]) for change in outcome.ends[0]["history"]) == 3
