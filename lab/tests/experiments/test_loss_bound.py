"""The study of bounded loss: what its patterns lose, in which order it runs, and what it concludes."""

import json
from dataclasses import replace

import numpy as np
import pytest

from paceline.errors import ConfigurationError
from paceline_lab.experiments.accuracy import loss_bound, loss_bound_runs
from paceline_lab.experiments.accuracy.loss_bound import BITS, PERCENT, LossStudy, cells_of
from paceline_lab.experiments.accuracy.loss_bound_runs import (
    BACK,
    BURST,
    FRONT,
    LARGEST,
    PATTERNS,
    QUICK,
    RANDOM,
    SMALLEST,
    TAIL,
    Case,
    LossOptions,
    LossOutcome,
    LossTrial,
    loss_pattern,
    train,
    trials,
)
from paceline_lab.experiments.accuracy.tasks import TASKS
from paceline_lab.experiments.runner import run_study

RANKS, CHUNKS = 4, 50


def lost(pattern, bound, collectives=30, owners=(1,), seed=0):
    """What is lost, shape (collectives * owners, chunks); magnitudes are a shuffle of 0 to 49."""
    lose = loss_pattern(Case(bound, pattern), seed, RANKS)
    magnitudes = np.random.default_rng(5).permutation(CHUNKS).astype(np.float32)
    return np.array([lose(number, 0, owner, magnitudes) for number in range(collectives) for owner in owners])


def trial(case, seed=0, options=QUICK):
    return replace(trials(options)[0], **vars(case), seed=seed)


@pytest.mark.parametrize("pattern", [p for p in PATTERNS if p not in (FRONT, BACK)])
def test_of_every_transfer_exactly_the_bound_is_lost(pattern):
    hit = lost(pattern, 0.1)
    assert set(hit.sum(axis=1)) == {5}
    assert (hit == lost(pattern, 0.1)).all()
    magnitudes = np.random.default_rng(5).permutation(CHUNKS)
    if pattern == TAIL:
        assert hit[:, 45:].all()
    elif pattern in (SMALLEST, LARGEST):
        assert set(magnitudes[hit[0]]) == set(range(5) if pattern == SMALLEST else range(45, 50))
    else:
        assert hit.any(axis=0).mean() > 0.9, "over time everything is hit"
        assert (lost(pattern, 0.1, seed=1) != hit).any()
        runs = [int(np.abs(np.diff(np.append(each, each[0]).astype(int))).sum()) for each in hit]
        assert (max(runs) == 2) == (pattern == BURST)


@pytest.mark.parametrize(("pattern", "owners", "others"), [(FRONT, (0, 1), (2, 3)), (BACK, (2, 3), (0, 1))])
def test_the_same_part_is_lost_of_one_half_of_the_layers_only(pattern, owners, others):
    """Shards are in the order of the elements: the first ranks own the front."""
    assert set(lost(pattern, 0.1, owners=owners).sum(axis=1)) == {10}
    assert not lost(pattern, 0.1, owners=others).any()
    assert lost(pattern, 0.5, owners=owners).all()


def test_less_than_a_chunk_is_lost_now_and_then():
    assert 0.005 < lost(RANDOM, 0.01, collectives=500).mean() < 0.015


@pytest.mark.slow
def test_a_run_is_reproducible_and_loss_without_compensation_shows():
    samples = TASKS[QUICK.model].load(None, QUICK.num_train)
    case = Case(0.9, TAIL, "none")
    one, again, exact = (train(trial(each), samples) for each in (case, case, Case(0.0)))
    assert one == again
    assert one.test_percent < exact.test_percent - 5
    assert one.test_loss > exact.test_loss + 0.1


def test_random_losses_come_first_and_further_seeds_last():
    options = LossOptions(bounds=(0.0, 0.1), compensations=("none",), num_seeds=5)
    order = trials(options)
    assert len(set(order)) == len(order) == 5 * (1 + len(PATTERNS))
    assert [(t.pattern, t.seed) for t in order[:6]] == [
        (pattern, seed) for seed in range(3) for pattern in ("", RANDOM)
    ]
    assert [t.seed > 2 for t in order] == [False] * 24 + [True] * 16


@pytest.mark.processes
def test_a_stopped_study_goes_on_and_reports_what_there_is(tmp_path, monkeypatch, capsys):
    computed = []

    def stopping(trial, samples):
        if len(computed) == 2:
            raise KeyboardInterrupt
        computed.append(trial)
        return LossOutcome(50.0 - len(computed), 2.0)

    monkeypatch.setattr(loss_bound, "train", stopping)
    study = LossStudy(tmp_path / "runs.jsonl")
    with pytest.raises(KeyboardInterrupt):
        study.measure(QUICK)
    shown = run_study(LossStudy(tmp_path / "runs.jsonl", only_show=True), QUICK, tmp_path, True)
    assert [row[:2] for row in shown.rows] == [("none", ""), ("random", "survivors")]
    assert any("2 of 4 runs are missing" in note for note in shown.notes)
    assert (tmp_path / "loss-bound-digits.png").exists()
    assert (
        json.loads((tmp_path / "loss-bound-digits.json").read_text())["summaries"]["cells"][1]["worse_by"]
        == 1
    )
    monkeypatch.setattr(
        loss_bound, "train", lambda trial, _: LossOutcome(computed.append(trial) or 40.0, 2.0)
    )
    assert len(study.measure(QUICK).outcomes) == 4
    assert computed == trials(QUICK)
    assert "paceline" in capsys.readouterr().out


def results(by_case):
    """Outcomes by seed: {case: [percent of seed 0, ...]}."""
    return {
        trial(case, seed): LossOutcome(percent, (100 - percent) / 10)
        for case, values in by_case.items()
        for seed, percent in enumerate(values)
    }


def test_findings_say_which_bound_is_harmless_and_from_which_on_it_is_seen():
    """Seeds that differ by 10 points hide nothing: each is compared with itself. 5 % was not run."""
    options = LossOptions(bounds=(0.0, 0.05, 0.1, 0.2, 0.3), patterns=(TAIL,), compensations=("none",))
    outcomes = results(
        {
            Case(0.0): [80.0, 90.0],
            Case(0.1, TAIL, "none"): [80.2, 89.8],
            Case(0.2, TAIL, "none"): [79.8, 89.7],
            Case(0.3, TAIL, "none"): [70.0, 80.0],
        }
    )
    findings = LossStudy(None).find(outcomes, options)
    assert findings.summaries["harmless_up_to"] == {"tail, none": 0.2}
    assert findings.summaries["seen_from"] == {"tail, none": 0.2}
    assert findings.rows[0][:4] == ("none", "", "2", "85.0 ± 7.1")
    assert findings.rows[1][:6] == ("tail", "none", "2", "", "", "85.0 ± 6.8")


def test_more_bits_are_worse_and_fewer_right_answers_are():
    outcomes = results({Case(0.0): [80.0], Case(0.1, TAIL, "none"): [70.0]})
    by_loss = cells_of(outcomes, BITS)[Case(0.1, TAIL, "none")]
    assert by_loss.worse_by == pytest.approx(1 / np.log(2))
    assert cells_of(outcomes, PERCENT)[Case(0.1, TAIL, "none")].worse_by == 10
    assert by_loss.error is None
    alone = LossTrial(**(vars(trial(Case(0.2, TAIL, "none"))) | {"seed": 7}))
    assert alone.case not in cells_of(outcomes | {alone: LossOutcome(1.0, None)}, PERCENT)


def test_options_that_cannot_be_are_refused():
    for wrong in (
        {"model": "vgg"},
        {"bounds": (0.1,)},
        {"num_train": 1000},
        {"patterns": ("all",)},
        {"compensations": ("both",)},
    ):
        with pytest.raises(ConfigurationError):
            LossOptions(**wrong)
    with pytest.raises(ConfigurationError, match="--bounds 60: values are percentages from 0 to 50"):
        LossOptions(bounds=(0.0, 0.6))
    assert set(loss_bound_runs._SAMPLES) == set(TASKS)
