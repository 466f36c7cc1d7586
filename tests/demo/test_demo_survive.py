"""What `paceline demo survive` counts, and what it calls a broken promise. docs/guide/demo.md runs the whole."""

from __future__ import annotations

import pytest
from rich.console import Console

from paceline.cli import main
from paceline.demo.comparison import PromiseBrokenError
from paceline.demo.survival import Training, verdict
from paceline.demo.surviving_rank import SurvivalJob

JOB = SurvivalJob(pipe="", num_ranks=2, epochs=2, num_samples=8, global_batch=4)


def _step(training, step, epoch, **samples_of):
    for name, samples in samples_of.items():
        training.receive(
            {
                "pid": int(name[1:]),
                "step": step,
                "epoch": epoch,
                "rank": int(name[1:]) - 10,
                "samples": list(samples),
            }
        )


def _trained(*, again=(4, 5, 6, 7), digest="same", killed=11):
    """Two epochs of two steps over processes 10 and 11; the second step is begun twice."""
    training = Training()
    _step(training, 0, 0, p10=[0, 1], p11=[2, 3])
    _step(training, 1, 0, p10=[4, 5], p11=[6, 7])
    training.killed = killed
    _step(training, 1, 1, p10=again)
    _step(training, 2, 1, p10=[0, 1, 2, 3])
    _step(training, 3, 2, p10=[4, 5], p12=[6, 7])
    changes = [{"stalled_s": 0.1, "num_new": 0}, {"stalled_s": 0.2, "num_new": 1}]
    for pid in (10, 12):
        training.receive({"pid": pid, "digest": digest, "steps": 4, "changes": changes})
    return training


def _calm():
    training = Training()
    training.receive({"pid": 1, "digest": "same", "steps": 4, "changes": []})
    return training


def test_a_step_counts_as_the_last_membership_trained_it():
    training = _trained()
    assert training.computed_again == 1
    assert training.wrong_samples(JOB) == (0, 0)


def test_a_replacement_takes_the_place_of_the_process_that_was_killed():
    training = _trained()
    assert training.places == {10: 0, 12: 1}
    assert training.dots() == "[green]●[/] [green]●[/]"
    training.killed = 12
    assert training.dots() == "[green]●[/] [bold red]✗[/]"


def test_the_verdict_has_what_the_loss_cost(capsys):
    rows = verdict(_calm(), _trained(), JOB, Console())
    assert (rows["steps_computed_again"], rows["samples_lost"], rows["replaced"]) == (1, 0, True)
    out = capsys.readouterr().out
    for words in (
        "steps computed again  1",
        "samples lost          0 of 16",
        "stall                 0.10 s, and 0.20 s when",
        "same bits as the undisturbed run",
    ):
        assert words in out


@pytest.mark.parametrize(
    ("training", "says"),
    [
        (_trained(again=(4, 5, 6)), '"samples_lost": 1'),
        (_trained(again=(4, 5, 6, 6)), '"samples_doubled": 1'),
        (_trained(again=(4, 5, 6, 7, 7)), '"samples_doubled": 1'),
        (_trained(digest="another"), '"same_bits": false'),
        (_trained(killed=None), '"killed": false'),
    ],
)
def test_a_broken_promise_fails_the_demo(training, says):
    with pytest.raises(PromiseBrokenError, match=says):
        verdict(_calm(), training, JOB, Console(quiet=True))


@pytest.mark.parametrize("demo", ["survive", "doctor"])
def test_options_of_the_comparison_are_refused(demo, capsys):
    with pytest.raises(SystemExit) as left:
        main(["demo", "--nproc-per-node", "3", demo])
    assert left.value.code == 2
    assert f"paceline demo {demo} takes no options, and --ranks-per-host is one of" in capsys.readouterr().err
