"""A shadow gets a connection to each rank of a membership, on all hosts, and none of two memberships."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from paceline.launch.elastic.agents import Agents, AgentSetting
from paceline.launch.elastic.givers import Givers, ask_host, call_all, call_host
from paceline.launch.elastic.links import tell_about
from paceline.launch.elastic.plan import NOT_STARTED, Address, Member, Proposal
from paceline.launch.elastic.vote import Quorum

NOWHERE = Address("127.0.0.1", 1)  # no process listens there
Answer = Callable[[], Givers]


@pytest.fixture
def agents() -> Iterator[list[Agents]]:
    """Two agents that have met, in epoch `epoch_of`."""
    listen, start = Address("127.0.0.1", 0), Address("127.0.0.1", 100)
    first = Agents(AgentSetting("0", 1, start, listen, None, "t", Quorum(2, 1), 60))
    second = Agents(AgentSetting("1", 1, start, listen, first.address, "t", Quorum(2, 1), 60))
    yield [first, second]
    for each in (first, second):
        each.close()


def epoch_of(agents: list[Agents]) -> int:
    """Have both bring a rank into a membership. Return its epoch."""
    plans = {}
    while len(plans) < 2:
        for each in agents:
            proposal = Proposal(0, {Member(each.name, 0): NOT_STARTED}, Address("127.0.0.1", 7))
            if (plan := each.decide(proposal)) is not None:
                plans[each.name] = plan
    return plans[agents[0].name].epoch


@contextlib.contextmanager
def giving(agent: Agents, answer: Answer) -> Iterator[None]:
    """Answer each request to that agent, and let each rank send its number."""
    ends = threading.Event()

    def serve() -> None:
        while not ends.is_set():
            if (asked := agent.to_give()) is not None:
                end, place = asked
                with end:
                    givers = answer()
                    tell_about(end, givers.as_dict())
                    if (place or 0) < len(givers.ranks):
                        end.sendall(bytes([givers.ranks[place or 0]]))
            time.sleep(0.001)

    thread = threading.Thread(target=serve)
    thread.start()
    yield
    ends.set()
    thread.join()


def numbers(ends: list[socket.socket]) -> list[int]:
    return [end.recv(1)[0] for end in ends]


def test_all_ranks_of_all_hosts_give(agents: list[Agents]) -> None:
    """By their numbers, of whichever host is called first."""
    first, second = agents
    there = Givers(5, (0, 2), 3, (first.address,), "a card")
    with (
        giving(first, lambda: Givers(5, (1,), 3, (second.address,), "a card")),
        giving(second, lambda: there),
        contextlib.ExitStack() as closes,
    ):
        givers = ask_host(second.address, "t")
        assert givers == there
        assert numbers(call_all(second.address, givers, "t", closes)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        (Givers(6, (1,), 2, (), ""), "is in another membership"),
        (Givers(5, (), 2, (), ""), "the membership changes"),  # its ranks have just been told to stop
        (Givers(5, (0,), 2, (), ""), "the membership changes"),
    ],
)
def test_hosts_that_disagree_are_asked_again(agents: list[Agents], theirs: Givers, why: str) -> None:
    """Nothing is followed then, and the connections are closed."""
    first, second = agents
    with (
        giving(first, lambda: Givers(5, (0,), 2, (second.address,), "")),
        giving(second, lambda: theirs),
        contextlib.ExitStack() as closes,
    ):
        givers = ask_host(first.address, "t")
        with pytest.raises(OSError, match=why):
            call_all(first.address, givers, "t", closes)


def test_an_agent_that_does_not_answer_is_named(agents: list[Agents]) -> None:
    """With what the kernel says."""
    first, _ = agents
    with giving(first, lambda: Givers(5, (0,), 2, (NOWHERE,), "")), contextlib.ExitStack() as closes:
        givers = ask_host(first.address, "t")
        with pytest.raises(OSError, match=r"127\.0\.0\.1:1: Connection refused"):
            call_all(first.address, givers, "t", closes)


def test_a_membership_that_changes_between_two_ranks_is_not_taken(agents: list[Agents]) -> None:
    """Its ranks may have other numbers in the next one."""
    first, _ = agents
    answers = iter([Givers(5, (0, 1), 2, (), ""), Givers(6, (0, 1), 2, (), "")])
    with (
        giving(first, lambda: next(answers)),
        contextlib.ExitStack() as closes,
        pytest.raises(OSError, match="the membership has changed"),
    ):
        call_host(first.address, "t", closes)


def test_words_of_another_form_are_no_answer() -> None:
    for told in ({}, {"ranks": 3, "others": []}, {"others": [[1]]}):
        with pytest.raises(ValueError, match="tells a shadow"):
            Givers.of(told)


def test_a_shadow_beside_a_rank_gets_the_states_of_other_hosts(agents: list[Agents]) -> None:
    """The other agent is called again until it is in the shadow's epoch."""
    first, second = agents
    epoch = epoch_of(agents)
    answers = [
        Givers(epoch, (1,), 2, (), ""),
        Givers(epoch, (), 2, (), ""),
        Givers(epoch - 1, (1,), 2, (), ""),
    ]
    taken: dict[int, socket.socket] = {}

    def answer() -> Givers:
        return answers.pop() if len(answers) > 1 else answers[0]

    with giving(second, answer):
        first.ask_for_shares(epoch, lambda rank, end: taken.setdefault(rank, end.dup()) is not None)
        while not taken:
            time.sleep(0.001)
    with taken[1] as end:
        assert (numbers([end]), len(answers)) == ([1], 1)


def test_no_agent_is_called_after_the_end_of_an_epoch(agents: list[Agents]) -> None:
    """The thread that calls ends."""
    first, _ = agents
    epoch = epoch_of(agents)
    first.ask_for_shares(epoch - 1, lambda *_: True)
    while any(each.name == "paceline calls" for each in threading.enumerate()):
        time.sleep(0.001)
