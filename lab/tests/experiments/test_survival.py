"""The survival study: which cases it draws, what it calls a failure, what it measures. Made-up notes, no processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline_lab.experiments.survival import cases, study
from paceline_lab.experiments.survival.job import Job, Outcome, problems, reference, standstills_s, trained
from paceline_lab.experiments.survival.stall import PARTS, parts_of
from paceline_lab.experiments.survival.training import MOMENTS, WAYS, Fault

JOB = Job(2, 1, ("--epochs", "1", "--samples", "4", "--batch", "4"))


def outcome(*, samples: tuple[list[int], ...] = ([0, 1], [2, 3]), tries: int = 1, **changed: Any) -> Outcome:
    """Two ranks that trained four samples in one step, as often as was tried."""
    ranks = []
    for own in samples:
        attempts = [
            {"what": "try", "at": 1.0 + t, "step": 0, "under": t, "of": 0, "samples": own}
            for t in range(tries)
        ]
        done = {"what": "done", "at": 9.0, "step": 0, "under": tries - 1}
        ranks.append([*attempts, done, {"what": "end", "at": 9.5, "step": 1, "bits": "b", "history": []}])
    models = [dict(reference(JOB.options, 1))]
    return Outcome(**{"code": 0, "said": "", "notes": ranks, "models": models, "num_left": 0, **changed})


def test_every_way_meets_every_moment() -> None:
    """All pairs but those that would be another kind of case: scripts that fail before training, two stops at once."""
    drawn = {(fault.how, fault.moment) for seed in range(1000) for fault in cases.random_job(seed).faults}
    anywhere = [moment for moment in MOMENTS if moment not in (*cases.AT_START, *cases.IN_RECOVERY)]
    ways = [how for how in WAYS if how != "memory" or cases.can_limit_memory()]
    expected = {(how, moment) for how in ways for moment in anywhere}
    expected |= {("SIGKILL", moment) for moment in MOMENTS}
    expected |= {(how, moment) for how in ("exit", "error") for moment in cases.IN_RECOVERY}
    assert expected <= drawn
    assert {moment for how, moment in drawn if how == "exit"}.isdisjoint(cases.AT_START)


def test_hosts_are_hit_in_every_way_the_first_one_too_and_two_at_once() -> None:
    jobs = [cases.random_hosts_job(seed) for seed in range(300)]
    kinds = {blow.kind for job in jobs for blow in job.blows if blow.host == 0}
    assert kinds == {"agent killed", "switched off", "cut", "half-open", "agent stopped", "host stopped"}
    assert any(len(job.blows) == 2 and job.blows[1].after_steps == 0 for job in jobs)


def test_a_good_case_has_no_problems() -> None:
    assert problems(JOB, outcome()) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"code": None, "ended_s": 100.0}, "it hung: ended 91 s after"),
        ({"code": None, "ended_s": 10.0}, "it was too slow"),
        ({"num_left": 1}, "left behind"),
        ({"samples": ([0, 1], [2])}, "1 samples were lost, 0 doubled"),
        ({"samples": ([0, 1], [1, 2, 3])}, "0 samples were lost, 1 doubled"),
        ({"tries": 2}, "1 steps were computed again after 0 faults"),
        (
            {"models": [{name: each + 1e-6 for name, each in reference(JOB.options, 1).items()}]},
            "differ by 1.00e-06",
        ),
    ],
)
def test_each_problem_is_seen(changed: dict[str, Any], words: str) -> None:
    assert words in "; ".join(problems(JOB, outcome(**changed)))


def test_with_deterministic_a_last_bit_is_a_problem() -> None:
    job = Job(2, 1, (*JOB.options, "--deterministic"))
    good = dict(reference(job.options, 2))
    assert problems(job, outcome(models=[good])) == []
    name = next(iter(good))
    nearly = {**good, name: torch.nextafter(good[name], good[name] + 1)}
    assert "differ by" in "; ".join(problems(job, outcome(models=[nearly])))


def test_a_step_that_is_done_again_counts_once() -> None:
    """The samples of the last try are those that count."""
    counts = trained(outcome(tries=3), 4, 1)
    assert (counts.num_lost, counts.num_doubled, counts.num_tries, counts.num_steps) == (0, 0, 3, 1)


def test_what_is_measured_begins_with_a_death_within_training() -> None:
    """A rank that only stopped, and one that died before the first step, stop nobody."""
    notes = [
        {"what": "fault", "at": 0.5, "step": 0, "moment": "rendezvous", "how": "SIGKILL"},
        {"what": "done", "at": 1.0, "step": 0, "under": 0},
        {"what": "fault", "at": 1.1, "step": 1, "moment": "forward", "how": "pause"},
        {"what": "fault", "at": 2.0, "step": 1, "moment": "forward", "how": "exit"},
        {"what": "done", "at": 2.25, "step": 1, "under": 1},
    ]
    assert standstills_s(Outcome(0, "", [notes], [], 0)) == [pytest.approx(0.25)]


def test_the_parts_of_a_stall_are_of_the_rank_that_took_longest() -> None:
    def rank(late: float) -> list[dict[str, Any]]:
        moved = {
            "what": "moved",
            "heard": 2.01,
            "left": 2.02,
            "seat": 2.05,
            "open": 2.1 + late,
            "at": 2.13 + late,
        }
        return [{"what": "done", "at": 1.0}, moved, {"what": "done", "at": 2.2 + late}]

    killed = [{"what": "done", "at": 1.0}, {"what": "fault", "at": 2.0, "how": "SIGKILL"}]
    (found,) = parts_of(Outcome(0, "", [rank(0.0), rank(0.5), killed], [], 0))
    assert [round(found[name]) for name in PARTS] == [10, 10, 30, 550, 30, 70]


def test_a_search_goes_on_where_it_was_stored(tmp_path: Any) -> None:
    found = study.Found(7)
    found._count(7, JOB, outcome(), ["SIGKILL: forward"])
    study.store(found, tmp_path / "survival.json")
    again = study.stored(tmp_path / "survival.json", 7)
    assert vars(again) == vars(found)
    assert again.num_cases == 1
    assert study.stored(tmp_path / "survival.json", 8).num_cases == 0
    assert str(Fault.parse("1:5:within bucket 0:exit")) == "1:5:within bucket 0:exit"
