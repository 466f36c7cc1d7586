"""One host's agent with a decider of the test's: a rank that waits is asked for until it has a rank assignment."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from harness import warm
from paceline.elastic.agent_connection import RESUME, AgentConnection, Ready, Receive, Trouble
from paceline.launch import command_line
from paceline.launch.agent import _ranks_failed
from paceline.launch.elastic.agent import Agent
from paceline.launch.elastic.local_ranks import Phase
from paceline.launch.elastic.plan import NOT_STARTED, Address, Decider, Member, OneHost, Plan, Proposal, Start
from paceline.launch.elastic.shadows import Shadows, ShadowStart
from paceline.launch.elastic.starting import Starter
from paceline.launch.launch_errors import LaunchError

RANK = """
from paceline.elastic.agent_connection import AgentConnection, Ready, RankAssignment
line = AgentConnection.of_this_process()
line.tell(Ready("a card"))
while not isinstance(line.hear(), RankAssignment):
    pass
"""

# Local rank 1 dies in its loop, and its replacements at once. Rank 0 fails to do what its agent asks for then, the last
# one writes it down.
LAST_ONES = """
import os, pathlib, sys
from paceline.elastic.agent_connection import (
    AgentConnection, Ended, InLoop, RankAssignment, Ready, Saved, Stop,
    Stopped,
)
line = AgentConnection.of_this_process()
if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
    sys.exit(1)
line.tell(Ready("a card", saves=True))
while not isinstance(said := line.hear(), Ended):
    if isinstance(said, RankAssignment):
        line.tell(InLoop(True))
        if os.environ["LOCAL_RANK"] == "1":
            sys.exit(1)
    elif isinstance(said, Stop):
        line.tell(Stopped(said.epoch, 3))
if os.environ["LOCAL_RANK"] == "0":
    line.tell(Saved("OSError: no space left on device"))
    sys.exit(1)
pathlib.Path(sys.argv[1]).write_text(said.why)
line.tell(Saved(""))
"""

# Local rank 1 dies in its loop. Its first replacement hangs as it is to receive the other's state, the second comes in.
HANGS = """
import os, signal, sys
from paceline.elastic.agent_connection import (
    AgentConnection, CaughtUp, Following, InLoop, Pause, RankAssignment, Ready, Receive, Stop,
    Stopped,
)
line = AgentConnection.of_this_process()
start = os.environ["TORCHELASTIC_RESTART_COUNT"]
line.tell(Ready("a card"))
while True:
    said = line.hear()
    if isinstance(said, RankAssignment):
        line.tell(InLoop(True))
        line.tell(Following(said.epoch))
        if start == "0" and os.environ["LOCAL_RANK"] == "1":
            os._exit(1)
        if said.num_new == 1:
            line.tell(InLoop(False))
            sys.exit()
    elif isinstance(said, (Stop, Pause)):
        line.tell(Stopped(said.epoch, 3))
    elif isinstance(said, Receive) and start == "1":
        signal.pause()
    elif isinstance(said, Receive):
        line.tell(CaughtUp())
"""


# Local rank 1 dies in its loop. Its replacement has another model. The other trains on until the test has seen enough.
DIFFERS = """
import os, pathlib, sys
from paceline.elastic.agent_connection import (
    AgentConnection, Following, InLoop, RankAssignment, Ready, Refused, Stop,
    Stopped,
)
line = AgentConnection.of_this_process()
start = os.environ["TORCHELASTIC_RESTART_COUNT"]
line.tell(Ready("torch 2\\n" + ("weight: [3]" if start == "0" else "weight: [4]")))
while True:
    said = line.hear()
    if isinstance(said, RankAssignment):
        line.tell(InLoop(True))
        line.tell(Following(said.epoch))
        if os.environ["LOCAL_RANK"] == "1":
            os._exit(1)
        if said.size == 1:
            open(sys.argv[1]).close()  # a pipe, which the test opens at the end
            line.tell(InLoop(False))
            sys.exit()
    elif isinstance(said, Stop):
        line.tell(Stopped(said.epoch, 3))
    elif isinstance(said, Refused):
        sys.exit(said.why)
"""


# It follows a rank of another host before it comes in; once it trains, it gives to one.
FOLLOWS = """
import sys
from paceline.elastic.agent_connection import (
    AgentConnection, CaughtUp, Give, InLoop, RankAssignment, Ready,
    Receive,
)
line = AgentConnection.of_this_process()
line.tell(Ready("a card"))
while True:
    said = line.hear()
    if isinstance(said, Receive):
        if line.handed.popleft().recv(5) == b"state":
            line.tell(CaughtUp())
    elif isinstance(said, RankAssignment):
        line.tell(InLoop(True))
    elif isinstance(said, Give):
        line.handed.popleft().sendall(b"mine")
        line.tell(InLoop(False))
        sys.exit()
"""


# The test stops local rank 1 as it trains. What the other says of a membership before this one means nothing.
STOPPED = """
import os, sys
from paceline.elastic.agent_connection import (
    AgentConnection, CaughtUp, Following, InLoop, Pause, RankAssignment, Ready, Receive, Stop,
    Stopped, Trouble,
)
line = AgentConnection.of_this_process()
line.tell(Ready("a card"))
while said := line.hear():
    if isinstance(said, RankAssignment):
        line.tell(InLoop(True))
        line.tell(Following(said.epoch))
        line.tell(Trouble(said.epoch - 1, "it is over"))
        if said.num_new == 1:
            line.tell(InLoop(False))
            sys.exit()
    elif isinstance(said, (Stop, Pause)):
        line.tell(Stopped(said.epoch - 1, 9))
        line.tell(Stopped(said.epoch, 3))
    elif isinstance(said, Receive):
        line.tell(CaughtUp())
"""

# Each membership fails; the second process of a local rank ends well.
FAILS = """
import os, sys
from paceline.elastic.agent_connection import (AgentConnection, InLoop, RankAssignment, Ready, Stop, Stopped, Trouble)
line = AgentConnection.of_this_process()
line.tell(Ready("a card"))
while said := line.hear():
    if isinstance(said, RankAssignment):
        if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
            sys.exit()
        line.tell(InLoop(True))
        line.tell(Trouble(said.epoch, "no luck"))
    elif isinstance(said, Stop):
        line.tell(Stopped(said.epoch, 3))
"""


# Local rank 1 fails behind its loop. The other ends well, and a replacement waits until then.
BEHIND = """
import os, sys
from paceline.elastic.agent_connection import Following, InLoop, AgentConnection, Ready, RankAssignment, Stop
line = AgentConnection.of_this_process()
line.tell(Ready("a card"))
while not isinstance(said := line.hear(), RankAssignment):
    pass
for said in (InLoop(True), Following(said.epoch), InLoop(False)):
    line.tell(said)
if os.environ["LOCAL_RANK"] == "1":
    sys.exit("No space left on device")
while not isinstance(line.hear(), Stop):
    pass
"""

# Local rank 1 comes late, and computes for ever as local rank 2 dies in its loop.
BUSY = """
import os, pathlib
from paceline.elastic.agent_connection import (
    AgentConnection, Following, InLoop, RankAssignment, Ready, Stop,
    Stopped,
)
line = AgentConnection.of_this_process()
if os.environ["LOCAL_RANK"] == "1":
    pathlib.Path(__file__).with_name("pipe").read_text()  # until the test closes it
line.tell(Ready("a card"))
while said := line.hear():
    if isinstance(said, RankAssignment):
        for word in (InLoop(True), Following(said.epoch)):
            line.tell(word)
        if os.environ["LOCAL_RANK"] == "2":
            os._exit(1)
        while os.environ["LOCAL_RANK"] == "1":
            pass
    elif isinstance(said, Stop):
        line.tell(Stopped(said.epoch, 3))
"""

# Local rank 0 ends well. The other has a further step, and writes down whether it is told that training is over.
GOES_ON = """
import os, pathlib, sys
from paceline.elastic.agent_connection import (
    AgentConnection, Following, InLoop, RankAssignment, Ready, Stop, Stopped,
    Trouble,
)
line = AgentConnection.of_this_process()
line.tell(Ready("a card"))
while said := line.hear():
    if isinstance(said, RankAssignment) and said.size == 2:
        for word in (InLoop(True), Following(said.epoch)):
            line.tell(word)
        if os.environ["LOCAL_RANK"] == "0":
            line.tell(InLoop(False, is_through=sys.argv[1] == "through"))
            sys.exit()
        line.tell(Trouble(said.epoch, "the connection was closed"))
    elif isinstance(said, RankAssignment):
        pathlib.Path(__file__).with_name("told").write_text(str(said.others_ended))
        line.tell(InLoop(False))
        sys.exit("there is no further step")
    elif isinstance(said, Stop):
        line.tell(Stopped(said.epoch, 3))
"""

# Local rank 1 dies in its loop. Its replacements come in, and fail before their first step. The other trains on until
# its local rank stays empty.
NEVER_STEPS = """
import os, sys
from paceline.elastic.agent_connection import (
    AgentConnection, CaughtUp, Following, InLoop, Pause, RankAssignment, Ready, Receive, Stop,
    Stopped,
)
line = AgentConnection.of_this_process()
line.tell(Ready("a card"))
step = 0
while said := line.hear():
    if isinstance(said, RankAssignment):
        line.tell(Following(said.epoch))
        if os.environ["LOCAL_RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
            sys.exit(1)
        line.tell(InLoop(True))
        if os.environ["LOCAL_RANK"] == "1":
            sys.exit(1)
    elif isinstance(said, (Stop, Pause)):
        step += 1
        line.tell(Stopped(said.epoch, step))
    elif isinstance(said, Receive):
        line.tell(CaughtUp())
"""

# Without paceline.Elastic: local rank 1 is killed as it trains. The other raises because of that, a moment earlier.
PLAIN = """
import os, signal, sys
if os.environ["LOCAL_RANK"] == "0":
    sys.exit("the connection was closed by the peer")
os.kill(os.getpid(), signal.SIGKILL)
"""


class OthersFirst(Decider):
    """The other hosts' newest plan is without this one. Who asks for a later one is taken in."""

    is_alone = False
    name = "here"

    def __init__(self) -> None:
        self.asked: list[tuple[int, bool]] = []

    def decide(self, proposal: Proposal) -> Plan | None:
        self.asked.append((proposal.epoch, proposal.has_paused))
        there = Member("there", 0)
        members = (there, *proposal.steps) if proposal.epoch > 4 else (there,)
        epoch, store = max(4, proposal.epoch), Address("127.0.0.1", 7)
        return Plan(epoch, members, 3, store, num_new=len(members) - 1)

    def holds_vote(self) -> bool:
        return False

    def may_leave(self, epoch: int) -> bool | None:
        return False


class Spare(OthersFirst):
    """There is room for this host once the other one is lost. Its ranks begin anew then."""

    others_are_lost = False

    def decide(self, proposal: Proposal) -> Plan | None:
        if not self.others_are_lost:
            return super().decide(proposal)
        members = tuple(proposal.steps)
        return Plan(proposal.epoch, members, NOT_STARTED, Address("127.0.0.1", 7), num_new=len(members))

    def is_spare(self) -> bool:
        return not self.others_are_lost

    def may_come_in(self) -> bool:
        return self.others_are_lost

    def why_over(self, epoch: int) -> str | None:
        return "there is not heard any more" if self.others_are_lost and epoch < 5 else None


MOST_LOOKS = 6000  # of at least 5 ms each


def made(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    rank: str,
    decider: Decider,
    num_ranks: int,
    *words: str,
    min_ranks: int = 1,
) -> tuple[Agent, list[str]]:
    """An agent of such ranks, and what it notes; of another decider than `OneHost` one whose job has begun."""
    script, notes = folder / "train.py", list[str]()
    script.write_text(rank)
    monkeypatch.setattr("sys.executable", str(warm.folder() / "python"))
    options = ["--nproc-per-node", str(num_ranks), "--min-ranks", str(min_ranks), "--lost-after", "5"]
    arguments = command_line.parse([*options, str(script), *words])
    start = Start(0, num_ranks, 0, 1, None) if decider.is_alone else None
    return Agent(arguments, decider, Starter(arguments), start, notes.append), notes


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
        while not agent.is_over:  # the rank ends well once it has an assignment
            agent.look()
    finally:
        agent.end(signal.SIGTERM)
    assert decider.asked == [(0, False), (5, True)]  # the second is not urgent: no rank was lost
    assert notes == ["2 ranks go on after step 3, with 1 that came in"]


# It is told to go once it trains, and makes a checkpoint if it is asked for one.
TOLD = """
import sys
from paceline.elastic.agent_connection import (
    AgentConnection, CaughtUp, Following, InLoop, Leave, Notice, Pause, RankAssignment, Ready, Receive, Saved, Stop,
    Stopped,
)
line = AgentConnection.of_this_process()
line.tell(Ready("a card", saves=True))
while said := line.hear():
    if isinstance(said, RankAssignment):
        line.tell(InLoop(True))
        line.tell(Following(said.epoch))
        line.tell(Notice())
    elif isinstance(said, (Stop, Pause)):
        line.tell(Stopped(said.epoch, 3))
    elif isinstance(said, Receive):
        line.tell(CaughtUp())
    elif isinstance(said, Leave):
        if said.saves:
            line.tell(Saved(""))
        sys.exit(said.code)
"""


class CountsOnLeavers(OthersFirst):
    """Its plan 6 still has the ranks that have left. In plan 7 this host makes the checkpoint, as all were told."""

    def decide(self, proposal: Proposal) -> Plan | None:
        if proposal.epoch < 6:
            plan = super().decide(proposal)
            assert plan is not None
            self.members = plan.members
            return plan
        self.asked.append((proposal.epoch, proposal.has_paused))
        there, store = Member("there", 0), Address("127.0.0.1", 7)
        members = self.members if proposal.epoch == 6 else (there,)
        return Plan(proposal.epoch, members, 3, store)

    def may_leave(self, epoch: int) -> bool | None:
        decided = self.asked[-1][0]
        return decided == 7 if decided > epoch else None


@pytest.mark.processes
def test_a_plan_that_counts_on_ranks_that_have_left_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They had ended without a checkpoint, which no other host made: all were told within milliseconds."""
    decider = CountsOnLeavers()
    agent, notes = made(tmp_path, monkeypatch, TOLD, decider, 1)
    try:
        while not any("has made a checkpoint" in each for each in notes):
            agent.look()
            assert (7, False) in decider.asked or len(decider.asked) < 4
    finally:
        agent.end(signal.SIGTERM)
    assert [epoch for epoch, _ in decider.asked] == [0, 5, 6, 7]


# In the place of python, for a shadow.
WRITES = """#!/bin/sh
trap 'sleep 0.2; touch written; exit' TERM
touch follows
while :; do sleep 0.01; done
"""


@pytest.mark.processes
def test_a_spare_begins_anew_when_its_shadow_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shadow had not been told to end if the plan came in the same moment as the loss: all waited for ever."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(RESUME, "")  # is set below
    decider = Spare()
    agent, notes = made(tmp_path, monkeypatch, RANK, decider, 1)
    shadow = tmp_path / "shadow"
    shadow.write_text(WRITES)
    shadow.chmod(0o700)
    start = ShadowStart(["train.py"], 5.0, "checkpoints", "127.0.0.1:9")
    try:
        while not agent._ranks.in_phase(Phase.WAITING):
            agent.look()
        monkeypatch.setattr("sys.executable", str(shadow))
        with Shadows(f"paceline-test/{os.getpid()}", start, notes.append) as agent.shadows:
            while not (tmp_path / "follows").exists():
                agent.look()
            decider.others_are_lost = True
            looks = 0
            while not agent.is_over and looks < MOST_LOOKS:
                agent.look()
                looks += 1
            assert (agent.is_over, (tmp_path / "written").exists()) == (True, True)
    finally:
        agent.end(signal.SIGTERM)
    assert "1 ranks begin again: those before them were all lost" in notes


# It trains until the test lets it end.
STAYS = """
import os, sys, time
from paceline.elastic.agent_connection import AgentConnection, Following, InLoop, RankAssignment, Ready
line = AgentConnection.of_this_process()
line.tell(Ready("a card"))
while not isinstance(said := line.hear(), RankAssignment):
    pass
line.tell(InLoop(True))
line.tell(Following(said.epoch))
while not os.path.exists("goes on"):
    time.sleep(0.01)
line.tell(InLoop(False, is_through=True))
"""


@pytest.mark.processes
def test_a_shadow_that_died_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and later ever more rarely. It is told whose shadow it is: other jobs may run the same script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(RESUME, "")  # is set below
    agent, notes = made(tmp_path, monkeypatch, STAYS, OneHost(), 1)
    shadow = tmp_path / "shadow"
    shadow.write_text('#!/bin/sh\necho "$@" >> started\n')
    shadow.chmod(0o700)
    name = f"paceline-test/{os.getpid()}"
    started = tmp_path / "started"
    try:
        while not agent._ranks.in_phase(Phase.WAITING, Phase.TRAINING):
            agent.look()
        monkeypatch.setattr("sys.executable", str(shadow))
        with Shadows(name, ShadowStart(["train.py"], 5.0, "checkpoints"), notes.append) as agent.shadows:
            looks = 0
            while not agent.is_over and looks < MOST_LOOKS:
                agent.look()
                looks += 1
                if started.exists() and started.read_text().count("\n") == 2:
                    (tmp_path / "goes on").touch()
    finally:
        agent.end(signal.SIGTERM)
    assert agent.is_over
    words = started.read_text().splitlines()
    assert len(words) == 2
    assert all(
        f"--agent {name}/{os.getpid()}." in each and each.endswith("--spare -- train.py") for each in words
    )


@pytest.mark.processes
def test_a_shadow_whose_connections_have_ended_follows_the_same_membership_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at once, as the membership may be over. A word of an earlier one changes nothing."""
    monkeypatch.chdir(tmp_path)
    agent, notes = made(tmp_path, monkeypatch, STAYS, OneHost(), 1)
    name = f"paceline-test/{os.getpid()}"
    with Shadows(name, ShadowStart(["train.py"], 5.0), notes.append) as agent.shadows:
        shadow = AgentConnection.to_job(agent.shadows._name)
        shadow.tell(Ready("a card"))
        received = []

        def look_until(num: int) -> None:
            looks = 0
            while len(received) < num and looks < MOST_LOOKS:
                agent.look()
                looks += 1
                while select.select([shadow], [], [], 0)[0]:
                    received.append(shadow.hear())

        try:
            look_until(1)
            epoch = received[0].epoch
            shadow.tell(Trouble(epoch - 1, "of the one before"))
            shadow.tell(Trouble(epoch, "it has ended"))
            told_s = time.monotonic()
            look_until(2)
            assert time.monotonic() - told_s > 0.9
            (tmp_path / "goes on").touch()
            while not agent.is_over:
                agent.look()
        finally:
            shadow.close()
            for each in shadow.handed:
                each.close()
            agent.end(signal.SIGTERM)
    assert received == [Receive(0, 1, epoch)] * 2


class Connected(OthersFirst):
    """A rank of another host gives its state late, and one of another takes this one's."""

    def __init__(self) -> None:
        super().__init__()
        self.take: Callable[[socket.socket], None] | None = None
        self.ours, theirs = socket.socketpair()
        self.theirs = [theirs]

    def ask_for_state(self, take: Callable[[socket.socket], None]) -> bool:
        self.take = take
        return True

    def to_give(self) -> tuple[socket.socket, None] | None:
        return (self.theirs.pop(), None) if self.theirs and (5, True) in self.asked else None


@pytest.mark.processes
def test_a_rank_comes_in_when_it_has_another_hosts_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is asked for a plan before; afterwards it gives to who asks."""
    script = tmp_path / "train.py"
    script.write_text(FOLLOWS)
    monkeypatch.setattr("sys.executable", str(warm.folder() / "python"))
    arguments = command_line.parse(["--nproc-per-node", "1", "--min-ranks", "1", str(script)])
    decider = Connected()
    agent = Agent(arguments, decider, Starter(arguments), None, lambda _: None)
    try:
        while decider.take is None:
            agent.look()
        for _ in range(10):
            agent.look()
        assert decider.asked == []
        ends = socket.socketpair()
        with ends[0], ends[1]:
            ends[0].sendall(b"state")
            decider.take(ends[1])
        while not agent.is_over:
            agent.look()
    finally:
        agent.end(signal.SIGTERM)
    assert decider.asked == [(0, False), (5, True)]
    with decider.ours:
        assert decider.ours.recv(4) == b"mine"


@pytest.mark.processes
def test_a_checkpoint_is_asked_for_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few ranks are left, and none comes. A rank that fails says why, and the next one is asked.

    None is asked where other hosts may train on: the checkpoint would take the place of a newer one.
    """
    script, saved, notes = tmp_path / "train.py", tmp_path / "saved", list[str]()
    script.write_text(LAST_ONES)
    monkeypatch.setattr("sys.executable", str(warm.folder() / "python"))
    arguments = command_line.parse(["--nproc-per-node", "3", "--min-ranks", "3", str(script), str(saved)])
    decider = OneHost()
    agent = Agent(arguments, decider, Starter(arguments), Start(0, 3, 0, 1, None), notes.append)
    try:
        with pytest.raises(LaunchError, match=r"2 rank\(s\) are left of at least 3") as raised:
            while True:
                agent.look()
        with monkeypatch.context() as patch:
            patch.setattr(decider, "holds_vote", lambda: False)
            agent.save(str(raised.value), lambda: None)
        assert notes[-1] == "no checkpoint is made here: other hosts may train on without this one"
        agent.save(str(raised.value), lambda: None)
    finally:
        agent.end(signal.SIGTERM)
    assert saved.read_text() == str(raised.value)
    said = [re.sub(r" \(pid \d+\)", "", note) for note in notes[-4:]]
    assert said == [
        "rank 0 is asked for a checkpoint after step 3",
        "rank 0 has made no checkpoint: OSError: no space left on device",
        "rank 2 is asked for a checkpoint after step 3",
        "rank 2 has made it",
    ]


@pytest.mark.processes
def test_a_replacement_that_hangs_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be waited for until it has caught up. It starts only once the other trains again."""
    script, notes = tmp_path / "train.py", list[str]()
    script.write_text(HANGS)
    monkeypatch.setattr("sys.executable", str(warm.folder() / "python"))
    arguments = command_line.parse(
        ["--nproc-per-node", "2", "--min-ranks", "1", "--lost-after", "0.5", str(script)]
    )
    agent = Agent(arguments, OneHost(), Starter(arguments), Start(0, 2, 0, 1, None), notes.append)
    try:
        while not agent.is_over:
            agent.look()
            assert not (agent._is_recovering and agent._ranks.in_phase(Phase.STARTING))
    finally:
        agent.end(signal.SIGTERM)
    said = "\n".join(notes)
    assert said.count("before it came in") == 1
    assert "stood still for 0." in said
    assert notes[-1] == "2 ranks go on after step 3, with 1 that came in"


@pytest.mark.processes
def test_a_stopped_rank_is_killed_and_replaced_and_old_words_are_not_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wake with an old epoch. A moment, as a debugger takes, is not held against one that has long waited."""
    agent, notes = made(tmp_path, monkeypatch, STOPPED, OneHost(), 2)
    stopped = None
    try:
        for _ in range(MOST_LOOKS):
            agent.look()
            training = agent._ranks.training
            if stopped is None and len(training) == 2 and time.monotonic() - training[1].moved_s > 1.0:
                stopped = training[1].process
                for number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGSTOP):
                    os.kill(stopped.pid, number)
                    agent.look()
                    assert len(agent._ranks.training) == 2
            if agent.is_over:
                break
    finally:
        agent.end(signal.SIGTERM)
    assert agent.is_over
    said = "\n".join(notes)
    assert "was stopped for 0." in said
    assert f"rank 1 (pid {stopped and stopped.pid}) was killed by SIGKILL" in said
    assert [note for note in notes if "go on" in note] == [
        "1 ranks go on after step 3, without rank(s) 1",
        "2 ranks go on after step 3, with 1 that came in",
    ]


class WithoutUs(OthersFirst):
    """The others take this host's rank in, and then go on without it."""

    def decide(self, proposal: Proposal) -> Plan | None:
        plan = super().decide(proposal)
        if proposal.epoch == 6:
            there = Member("there", 0)
            return Plan(7, (there,), 3, Address("127.0.0.1", 7))
        return plan


@pytest.mark.processes
def test_a_rank_without_which_others_went_on_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it holds is old. Another process comes in instead."""
    decider = WithoutUs()
    agent, _ = made(tmp_path, monkeypatch, FAILS, decider, 1)
    try:
        for _ in range(MOST_LOOKS):
            agent.look()
            if agent.is_over:
                break
    finally:
        agent.end(signal.SIGTERM)
    assert agent.is_over
    assert decider.asked == [(0, False), (5, True), (6, False), (8, True)]


@pytest.mark.processes
def test_a_rank_that_fails_behind_its_loop_fails_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under torchrun: what it had to save is not there, although the other ended well."""
    agent, notes = made(tmp_path, monkeypatch, BEHIND, OneHost(), 2)
    said = r"rank\(s\) 1 of .*train.py failed behind the last step: rank 1 \(pid \d+\) exited with code 1\. "
    try:
        with pytest.raises(LaunchError, match=said):
            for _ in range(MOST_LOOKS):
                agent.look()
    finally:
        agent.end(signal.SIGTERM)
    assert not agent.is_over
    assert len(notes) == 1


@pytest.mark.processes
def test_a_rank_that_computes_for_ever_is_waited_for_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not lost. The hang watch, which sees no collective then, is told for whom the others wait."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    agent, _ = made(tmp_path, monkeypatch, BUSY, OneHost(), 3)
    told: list[tuple[set[int], set[int], str]] = []
    agent._waits = lambda waiting, missing, what: told.append(({*waiting}, {*missing}, what))

    def look_until(expected: tuple[set[int], set[int], str]) -> None:
        for _ in range(MOST_LOOKS):
            agent.look()
            if told[-1] == expected:
                return
        raise AssertionError(told[-1])

    try:
        look_until(({0, 2}, {1}, "waiting in paceline.Elastic for all ranks"))
        pipe.write_text("")
        look_until(({0}, {1}, "waiting for all ranks to stop"))
        agent._ranks.kill(agent._ranks.training[1])
        look_until((set(), set(), "waiting for all ranks to stop"))
    finally:
        agent.end(signal.SIGKILL)


@pytest.mark.processes
def test_a_script_without_elastic_ends_as_without_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have trained: nothing is started again, and the rank that was killed is named first."""
    agent, notes = made(tmp_path, monkeypatch, PLAIN, OneHost(), 2)
    try:
        with pytest.raises(ChildFailedError) as raised:
            for _ in range(MOST_LOOKS):
                agent.look()
    finally:
        agent.end(signal.SIGTERM)
    assert notes == []
    said = _ranks_failed(agent._arguments, raised.value, 3.0)
    killed = r"rank 1 of .*train.py \(pid \d+\) was killed by SIGKILL, 3.0 s after the start, before the ranks had met"
    assert re.match(rf"{killed} in paceline.Elastic; rank 0 exited with code 1\. A script without", said)


@pytest.mark.processes
@pytest.mark.parametrize("how", ["through", "within an epoch"])
def test_nobody_trains_on_because_others_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A rank alone trained two epochs more than the others, below --min-ranks, and the launch ended well.

    Others may have ended at the end of an epoch: then it is told. Or within one: then it is one of too few.
    """
    agent, notes = made(tmp_path, monkeypatch, GOES_ON, OneHost(), 2, how, min_ranks=2)
    words = "failed behind the last step" if how == "through" else r"1 rank\(s\) are left of at least 2"
    try:
        with pytest.raises(LaunchError, match=words):
            for _ in range(MOST_LOOKS):
                agent.look()
    finally:
        agent.end(signal.SIGTERM)
    assert not any("go on" in note for note in notes)
    if how == "through":
        assert (tmp_path / "told").read_text() == "True"
        assert "1 ranks end after step 3, without rank(s) 0" in notes


@pytest.mark.processes
def test_replacements_that_fail_before_their_first_step_are_not_started_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each had come in, and stopped the others for a moment."""
    agent, notes = made(tmp_path, monkeypatch, NEVER_STEPS, OneHost(), 2)
    try:
        for _ in range(MOST_LOOKS):
            agent.look()
            if any("is not started again" in note for note in notes):
                break
    finally:
        agent.end(signal.SIGTERM)
    assert notes[-1] == "local rank 1 is not started again: 3 replacements in a row did not come to a step"
    assert sum("exited with code 1 before its first step" in note for note in notes) == 3


@pytest.mark.processes
def test_memberships_that_complete_no_step_come_to_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails there fails again."""
    agent, _ = made(tmp_path, monkeypatch, FAILS, OneHost(), 1)
    try:
        with pytest.raises(LaunchError, match=r"10 memberships in a row did not complete step 4 .*: no luck"):
            for _ in range(MOST_LOOKS):
                agent.look()
    finally:
        agent.end(signal.SIGTERM)


@pytest.mark.processes
def test_a_replacement_that_differs_is_refused_and_the_others_train_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Another version, model or data set: it is told how it differs, and its local rank stays empty."""
    script, pipe, notes = tmp_path / "train.py", tmp_path / "pipe", list[str]()
    script.write_text(DIFFERS)
    os.mkfifo(pipe)
    monkeypatch.setattr("sys.executable", str(warm.folder() / "python"))
    arguments = command_line.parse(["--nproc-per-node", "2", "--min-ranks", "1", str(script), str(pipe)])
    agent = Agent(arguments, OneHost(), Starter(arguments), Start(0, 2, 0, 1, None), notes.append)
    try:
        while not any("is not started again" in note for note in notes):
            agent.look()
        pipe.open("w").close()
        while not agent.is_over:
            agent.look()
    finally:
        agent.end(signal.SIGTERM)
    differs = "it has 'weight: [4]' where the others have 'weight: [3]'"
    assert any(f"cannot come in: {differs}" in note for note in notes)
    assert (
        f"this rank cannot join the others: {differs}. Start it as they were started."
        in capfd.readouterr().err
    )
    assert notes[-1] == "local rank 1 is not started again: what starts there cannot come in"
