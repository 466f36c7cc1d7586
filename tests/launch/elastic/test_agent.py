"""One host's agent with a decider of the test's: a rank that waits is asked for until it has a seat."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from harness import warm
from paceline.launch import command_line
from paceline.launch.elastic.agent import Agent
from paceline.launch.elastic.plan import Address, Member, Plan, Proposal
from paceline.launch.elastic.starting import Starter

RANK = """
from paceline.elastic.line import Line, Ready, Seat
line = Line.of_this_process()
line.tell(Ready("a card"))
while not isinstance(line.hear(), Seat):
    pass
"""


class OthersFirst:
    """The other hosts' newest plan is without this one. Who asks for a later one is taken in."""

    is_alone = False
    name = "here"

    def __init__(self) -> None:
        self.asked: list[int] = []

    def decide(self, proposal: Proposal) -> Plan | None:
        self.asked.append(proposal.epoch)
        there = Member("there", 0)
        members = (there, *proposal.steps) if proposal.epoch > 4 else (there,)
        epoch, store = max(4, proposal.epoch), Address("127.0.0.1", 7)
        return Plan(epoch, members, ("there",), "there", 3, there, store, num_new=len(members) - 1)

    def why_over(self, _epoch: int) -> str | None:
        return None


@pytest.mark.processes
def test_a_host_that_comes_late_asks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had followed the others' plan and its rank waited for ever, until the others had ended."""
    script = tmp_path / "train.py"
    script.write_text(RANK)
    monkeypatch.setattr("sys.executable", str(warm.folder() / "python"))
    arguments = command_line.parse(["--nproc-per-node", "1", "--min-ranks", "1", str(script)])
    decider, notes = OthersFirst(), []
    agent = Agent(arguments, decider, Starter(arguments), None, notes.append)
    try:
        while not agent.is_over:  # the rank ends well once it has a seat
            agent.look()
    finally:
        agent.end(signal.SIGTERM)
    assert decider.asked == [0, 5]
    assert notes == ["2 ranks go on after step 3, with 1 that came in"]
