"""The survival study: which cases it draws, what it calls a failure, what it measures. Made-up notes, no processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.engine_clusters import RAY_DRIVER
from paceline_lab.experiments.survival import cases, guests, study
from paceline_lab.experiments.survival.job import Job, Outcome, problems, reference, trained
from paceline_lab.experiments.survival.record import Case, Report, words
from paceline_lab.experiments.survival.stall import PARTS, parts_of
from paceline_lab.experiments.survival.standstills import KINDS, standstills
from paceline_lab.experiments.survival.training import MOMENTS, WAYS, Fault

JOB = Job(2, 1, ("--epochs", "1", "--samples", "4", "--batch", "4"))


def outcome(
    *,
    samples: tuple[list[int], ...] = ([0, 1], [2, 3]),
    tries: int = 1,
    pauses: int = 0,
    saved: tuple[int, ...] = (),
    **changed: Any,
) -> Outcome:
    """Two ranks that trained four samples in one step, as often as was tried; another one paused."""
    ranks = [[fault(1.5, "pause")]] * pauses + [[{"what": "saved", "step": step}] for step in saved]
    for own in samples:
        attempts = [
            {"what": "try", "at": 1.0 + t, "step": 0, "under": t, "of": 0, "samples": own}
            for t in range(tries)
        ]
        done = {"what": "done", "at": 9.0, "step": 0, "under": tries - 1, "took_s": 0.1}
        ranks.append([*attempts, done, {"what": "end", "at": 9.5, "step": 1, "bits": "b", "history": []}])
    models = [dict(reference(JOB.options, 1))]
    return Outcome(**{"code": 0, "said": "", "notes": ranks, "models": models, "num_left": 0, **changed})


def test_every_way_meets_every_moment() -> None:
    """All pairs but those that would be another kind of case: scripts that fail before training, two stops at once."""
    drawn = {(fault.how, fault.moment) for seed in range(1000) for fault in cases.random_job(seed).faults}
    anywhere = [moment for moment in MOMENTS if moment not in (*cases.AT_START, *cases.IN_RECOVERY)]
    ways = [how for how in WAYS if how != "memory" or cases.can_limit_memory()]
    expected = {(how, moment) for how in ways for moment in anywhere}
    expected |= {("SIGKILL", moment) for moment in MOMENTS if moment not in cases.AT_START}
    expected |= {("pause", moment) for moment in cases.AT_START}
    expected |= {(how, moment) for how in ("exit", "error") for moment in cases.IN_RECOVERY}
    assert expected <= drawn
    assert {moment for how, moment in drawn if how != "pause"}.isdisjoint(cases.AT_START)


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
        ({"tries": 2, "pauses": 1}, "1 steps were computed again after 0 faults"),
        ({"models": []}, "no rank left its parameters"),
        ({"saved": (-1, 0, 1)}, "checkpoints after [-1] steps were written when others had done step 0"),
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


def fault(at: float, how: str = "SIGKILL", moment: str = "forward") -> dict[str, Any]:
    return {"what": "fault", "at": at, "step": 1, "moment": moment, "how": how}


def stills(*blows: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Of a job whose members do this, each a process; another completes a step at 1 s, and under epoch 1 at 3 s."""
    trains = {"what": "try", "at": 0.9, "step": 0, "under": 0, "of": 0, "samples": []}
    lives = [
        {"what": "done", "at": 1.0, "step": 0, "under": 0},
        {"what": "done", "at": 3.0, "step": 1, "under": 1},
    ]
    found = standstills(Outcome(0, "", [lives, *([trains, blow] for blow in blows)], [], 0))
    return [(each.kind, round(each.seconds, 3), round(each.since_last_s, 3)) for each in found]


@pytest.mark.parametrize(
    ("blows", "kind", "seconds", "since_last_s"),
    [
        ([fault(2.0, "exit")], "one death", 1.0, 1.0),
        ([fault(2.0, "error")], "one that raised", 1.0, 1.0),
        ([fault(2.0, "memory")], "one out of memory", 1.0, 1.0),
        ([fault(2.0), fault(2.001)], "two at once", 1.0, 0.999),
        ([fault(2.0), fault(2.5, "error", "recovery")], "another in the recovery", 1.0, 0.5),
        ([fault(2.0), fault(2.5, "pause")], "a stopped rank", 1.0, 0.5),
        ([fault(2.0, "SIGSTOP")], "a stopped rank", 1.0, 1.0),
        ([fault(2.0, moment="receiving")], "as a rank comes in", 1.0, 1.0),
    ],
)
def test_a_standstill_says_what_happened(
    blows: list[dict[str, Any]], kind: str, seconds: float, since_last_s: float
) -> None:
    assert stills(*blows) == [(kind, seconds, since_last_s)]
    assert kind in KINDS


def test_a_standstill_begins_with_a_death_within_training() -> None:
    """A rank that only paused, one that died before the first step, and one behind the last stop nobody."""
    assert stills(fault(1.5, "pause")) == stills(fault(0.95)) == stills(fault(3.5)) == []


def test_a_replacement_that_dies_before_it_comes_in_stops_nobody() -> None:
    """The next membership begins when another one comes, and meanwhile all train."""
    lives = [{"what": "done", "at": float(at), "step": at, "under": at // 9} for at in range(1, 12)]
    for moment in ("rendezvous", "coming in", "replaying"):
        assert standstills(Outcome(0, "", [lives, [fault(2.0, moment=moment)]], [], 0)) == []


def moved(at: float, heard: float) -> dict[str, Any]:
    names = ("heard", "left", "assignment", "open", "met", "beside")
    return {"what": "moved", "at": at, **{name: heard + 0.01 * i for i, name in enumerate(names)}}


def dies(at: float) -> list[dict[str, Any]]:
    return [{"what": "done", "at": 1.0}, {"what": "fault", "at": at, "how": "SIGKILL"}]


def test_the_parts_of_a_stall_are_of_the_rank_that_took_longest() -> None:
    def rank(late: float) -> list[dict[str, Any]]:
        return [{"what": "done", "at": 1.0}, moved(2.1 + late, 2.01), {"what": "done", "at": 2.2 + late}]

    (found,) = parts_of(Outcome(0, "", [rank(0.0), rank(0.5), dies(2.0)], [], 0))
    assert [round(found[name]) for name in PARTS] == [0, 10, 10, 10, 10, 10, 10, 540, 100]


def test_a_stall_with_two_deaths_ends_with_the_second_recovery() -> None:
    """The rank had gone on, and lost the step again; a later death is another standstill."""
    lives = [moved(2.1, 2.01), moved(2.5, 2.31), {"what": "done", "at": 2.6}, moved(4.1, 4.01)]
    notes = [
        [{"what": "done", "at": 1.0}, *lives, {"what": "done", "at": 4.2}],
        dies(2.0),
        dies(2.3),
        dies(4.0),
    ]
    first, second = parts_of(Outcome(0, "", notes, [], 0))
    assert [round(first[name]) for name in PARTS] == [300, 10, 10, 10, 10, 10, 10, 140, 100]
    assert round(sum(second.values())) == 200


@pytest.mark.processes
def test_searches_side_by_side_add_to_one_report(tmp_path: Any) -> None:
    """A record a seed; the later one of a seed counts."""
    here, there = Report(tmp_path / "survival.json"), Report(tmp_path / "survival.json")
    common = {"commit": "abc", "load": 1.0, "took_s": 5.0}
    here.add(Case(7, **common, happened=["SIGKILL: forward"], standstills=[("one death", 0.2, 0.2)]))
    there.add(Case(3, **common, problem="it hung", has_hung=True))
    here.add(Case(3, **common, samples_lost=2, problem="2 samples were lost"))
    cases = there.cases()
    assert [case.seed for case in cases] == [3, 7]
    assert "2 cases, 1 faults" in words(cases)
    assert "0 hangs, 2 samples lost, 0 doubled, 1 failures" in words(cases)
    assert ["one", "death", "1", "200", "200", "200", "200"] in [
        line.split() for line in words(cases).splitlines()
    ]


@pytest.mark.processes
def test_what_came_out_is_counted() -> None:
    performed = study.Performed(
        JOB, outcome(samples=([0, 1], [2])), ["SIGKILL: forward"], [("one death", 0.2, 0.2)]
    )
    found = study.case_of(7, performed, 5.0)
    assert (found.seed, found.samples_lost, found.took_s, found.problem) == (
        7,
        1,
        5.0,
        "1 samples were lost, 0 doubled",
    )
    assert str(Fault.parse("1:5:within bucket 0:exit")) == "1:5:within bucket 0:exit"


def told_job(*steps_again: int, saved: int | None = 1, loss_s: float | None = None) -> list[str]:
    """Return the problems of a job of which all were told after one step, and which had done that step again."""
    ranks = [
        {"what": "try", "at": 1.0 + under, "step": 0, "under": under, "of": 0, "samples": [0, 1, 2, 3]}
        for under in range(1 + len(steps_again))
    ]
    notes = [*ranks, {"what": "done", "at": 9.0, "step": 0, "under": len(steps_again), "took_s": 0.1}]
    notes += [] if saved is None else [{"what": "saved", "step": saved}]
    found = guests.GuestOutcome(Outcome(0, "", [notes], [], 0))
    found.struck = [(0.5, guests.Event("told")), (9.0, guests.Event("all told"))]
    found.struck += [] if loss_s is None else [(loss_s, guests.Event("killed"))]
    return guests.guest_problems(guests.GuestJob("processes", 1, 1, JOB, ()), found)


def test_what_an_engines_ranks_have_to_keep() -> None:
    """A notice costs no step, and if all are told a checkpoint of the last step is written."""
    assert told_job() == []
    assert told_job(0, loss_s=1.5) == []
    assert told_job(0) == ["steps [0] were computed again without a loss"]
    for saved, written in ((None, []), (0, [0])):
        assert told_job(saved=saved) == [
            f"all were told after 1 steps, and checkpoints were written after {written}"
        ]


def test_engines_take_turns_and_every_kind_of_event_happens() -> None:
    jobs = [guests.random_guest_job(seed) for seed in range(200)]
    shares = [sum(job.engine == name for job in jobs) for name in guests.ENGINES]
    assert shares == [4 * share for share in guests.SHARES]
    kinds = {(event.kind, event.host == 0) for job in jobs for event in job.events if event.kind != "joined"}
    assert {"killed", "agent killed", "moved", "told", "host told", "split"} <= {
        kind for kind, first in kinds if first
    }
    assert {"all told", "started after the end", "late name"} <= {kind for kind, _ in kinds}


def test_an_array_has_ended_when_all_of_its_tasks_have() -> None:
    """Slurm shows tasks that have never run in one record, and later each in a record of its own."""
    shown = ["JobId=1 ArrayTaskId=0-1 JobState=PENDING"]
    shown += [f"JobId={n} ArrayTaskId={n - 2} JobState=COMPLETED\n\n" for n in (2, 3)]
    slurm = guests.SlurmArray.__new__(guests.SlurmArray)
    slurm._tasks, slurm._array, slurm._returns, slurm.is_told = {}, "1", {}, False
    ended = []
    for said in (shown[0], shown[1] + shown[0].replace("0-1", "1"), shown[1] + shown[2]):
        slurm._slurm = SimpleNamespace(say=lambda *_, said=said: said)  # type: ignore[assignment]
        slurm._look()
        ended.append(slurm.has_ended)
    assert ended == [False, False, True]


FAKE_RAY = """
from types import SimpleNamespace
util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
exceptions = SimpleNamespace(RayError=RuntimeError)
def init(**_): pass
def wait(refs, **_): return refs, []
def get(ref): return ref[0]
def remote(**_):
    def make(of):
        def start():
            return SimpleNamespace(train=SimpleNamespace(remote=lambda *words: (of().train(*words), object())))
        return SimpleNamespace(remote=start)
    return make
"""


@pytest.mark.processes
def test_an_actor_that_begins_as_all_are_told_ends(tmp_path: Path) -> None:
    """Its node has a notice, which never goes, because nothing is to run again."""
    (tmp_path / "ray.py").write_text(FAKE_RAY)
    (tmp_path / "driver.py").write_text(RAY_DRIVER)
    (tmp_path / "ranks").write_text("1")
    for name in ("notice-10.0.0.1", "stops"):
        (tmp_path / name).touch()
    command = [sys.executable, "-S", str(tmp_path / "driver.py"), "head:1", str(tmp_path), "a script"]
    subprocess.run(command, env={"SETTING": "{}"}, timeout=60, check=True)
    assert (tmp_path / "codes").read_text() == "[143]"
