"""Hosts that are lost, cut off or stopped while they train: the others go on, and nothing of the training is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness import warm
from paceline_lab.experiments.survival.hosts import Blow, HostsJob, HostsOutcome, run_on_hosts
from paceline_lab.experiments.survival.job import Job, problems, read_notes
from paceline_lab.experiments.survival.training import Fault

pytestmark = [pytest.mark.lab, pytest.mark.processes, pytest.mark.timeout(600)]

SHORT, LONG = 8, 60  # epochs of nine steps


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The model that is trained here for comparison is small: on a busy machine two threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(folder: Path, blow: Blow, epochs: int, *, returns: bool = False) -> HostsOutcome:
    """Three hosts with a rank each, of which one is hit; what must hold in any case is checked."""
    options = ("--epochs", str(epochs), "--pause-ms", "40")
    job = Job(min_ranks=1, options=options, lost_after_s=3.0, limit_s=400.0)
    found = run_on_hosts(HostsJob(3, 1, job, (blow,), returns), folder)
    assert problems(job, found.outcome) == [], "\n".join(found.said)
    return found


@pytest.mark.parametrize("dies", ["nobody", "replaying", "giving"])
def test_a_host_that_is_started_again_follows_one_that_trains(tmp_path: Path, dies: str) -> None:
    """Its ranks have the others' state, bit for bit, when they come in; if one dies meanwhile, others come."""
    options = ("--epochs", "40", "--pause-ms", "20", "--optimizer", "adamw", "--deterministic")
    faults = {"replaying": (1, Fault(0, 0, dies)), "giving": (0, Fault(0, 0, dies))}
    job = Job(4, 1, options, lost_after_s=3.0, limit_s=500.0, python=str(warm.folder() / "python"))
    fatal = tuple(faults[name] for name in faults if name == dies)
    blows = (Blow(1, "agent killed"),)
    found = run_on_hosts(HostsJob(2, 2, job, blows, returns=True, faults=fatal), tmp_path)
    assert problems(job, found.outcome) == [], "\n".join(found.said)
    assert found.codes == [0, 0]
    assert len(found.outcome.ends) == 4
    assert len(found.outcome.of("fault")) == len(fatal)
    if dies == "nobody":
        notes = [note for file in tmp_path.glob("host1/*.jsonl") for note in read_notes(file)]
        assert any("gradients" in note["frame"] for note in notes if note["what"] == "followed")
        assert [note["all"] for note in notes if note["what"] == "took"] == [False, False]


@pytest.mark.parametrize("host", [0, 2])
def test_an_agent_is_killed(tmp_path: Path, host: int) -> None:
    """With it go its ranks; of the first host also the store in which all have met."""
    found = run(tmp_path, Blow(host, "agent killed"), SHORT)
    assert [code for i, code in enumerate(found.codes) if i != host] == [0, 0]
    assert len(found.outcome.ends) == 2
    assert all(change["lost"] == (host,) or change["lost"] == [host] for change in found.outcome.changes)


def test_the_first_host_is_switched_off(tmp_path: Path) -> None:
    """Nobody hears anything of it any more: silence decides."""
    found = run(tmp_path, Blow(0, "switched off"), SHORT)
    assert found.codes[1:] == [0, 0]


def test_the_first_host_is_started_again(tmp_path: Path) -> None:
    """By the same command, which says that it begins a job: it joins the one that goes on."""
    found = run(tmp_path, Blow(0, "agent killed"), 2 * LONG, returns=True)
    assert found.codes == [0, 0, 0]
    assert len(found.outcome.ends) == 3


@pytest.mark.parametrize(
    "blow", [Blow(1, "cut", 5.0), Blow(1, "host stopped", 20.0)], ids=lambda blow: blow.kind
)
def test_a_host_comes_back(tmp_path: Path, blow: Blow) -> None:
    """The others went on without it; its ranks are started anew, and take their state."""
    found = run(tmp_path, blow, 2 * LONG)
    assert found.codes == [0, 0, 0]
    assert len(found.outcome.ends) == 3


def test_a_host_is_cut_off_for_good(tmp_path: Path) -> None:
    """It waits for a majority, says for what, and ends; the others need no word from it."""
    found = run(tmp_path, Blow(1, "cut"), SHORT)
    assert (found.codes[0], found.codes[2]) == (0, 0)
    assert found.codes[1] == 1
    assert "reaches 1 of 3 agents" in found.said[1]
