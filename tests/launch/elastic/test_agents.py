"""Agents over real sockets: they meet by the job's token, see a death at once, and let no stranger in."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.elastic.discovery import Discovery
from paceline.errors import ProtocolError
from paceline.launch.elastic import links
from paceline.launch.elastic.agents import Agents, AgentSetting, GuestHosts
from paceline.launch.elastic.decision import AgentInfo, Candidate, Decision
from paceline.launch.elastic.links import (
    CODE_BYTES,
    GREETING,
    NONCE_BYTES,
    Closed,
    Links,
    Received,
    Stranger,
    call_for_state,
    frame_of,
)
from paceline.launch.elastic.plan import NOT_STARTED, Address, Member, Plan, Proposal
from paceline.launch.elastic.plan import Start as Begin
from paceline.launch.elastic.record import JobRecord
from paceline.launch.elastic.vote import Message, Promise, Quorum, Report
from paceline.launch.elastic.wire import Packet, decode, encode
from paceline.launch.launch_errors import LaunchError

LOCAL = Address("127.0.0.1", 0)
THREE, TWO = Quorum(3, 1), Quorum(2, 1)
Start = Callable[..., Agents]


def until(happens: Callable[[], object], limit_s: float = 20.0) -> None:
    end_s = time.monotonic() + limit_s
    while not happens():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.005)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts agents, and ends them."""
    running: list[Agents] = []

    def start_one(
        first: Agents | None = None,
        token: str = "t",
        needs: Quorum = THREE,
        patience_s: float = 60,
        note: Callable[[str], None] = print,
        listen: Address = LOCAL,
    ) -> Agents:
        place = None if first is None else first.address
        number = len(running)
        start = Address("127.0.0.1", 100 + number)
        running.append(
            Agents(
                AgentSetting(f"{number}", number + 1, start, listen, place, token, needs, patience_s), note
            )
        )
        return running[-1]

    yield start_one
    for agent in running:
        agent.close()


def propose(agent: Agents, epoch: int = 0, step: int = NOT_STARTED) -> Plan | None:
    return agent.decide(Proposal(epoch, {Member(agent.name, 0): step}, Address("127.0.0.1", 7)))


def meet(agents: list[Agents], epoch: int = 0, step: int = NOT_STARTED) -> list[Plan]:
    """Ask until all have a plan of this epoch or a later one."""
    plans: dict[str, Plan] = {}

    def ask() -> bool:
        for agent in agents:
            if agent.name not in plans and (plan := propose(agent, epoch, step)) is not None:
                plans[agent.name] = plan
        return len(plans) == len(agents)

    until(ask)
    return [plans[agent.name] for agent in agents]


def test_three_agents_meet_and_go_on_without_the_first(start: Start) -> None:
    """The first agent, by which they met, is closed: the others see it, and decide on the next plan."""
    first = start()
    agents = [first, start(first), start(first)]
    plans = meet(agents)
    assert plans[0] == plans[1] == plans[2]
    assert len(plans[0].members) == 3
    assert not any(agent.why_over(plans[0].epoch) for agent in agents)
    began_s = time.monotonic()
    first.close()
    left = agents[1:]
    until(lambda: all(agent.why_over(plans[0].epoch) for agent in left))
    after = meet(left, plans[0].epoch + 1, step=5)
    assert after[0] == after[1]
    assert (after[0].step, len(after[0].members)) == (5, 2)
    assert time.monotonic() - began_s < 20


def test_the_first_of_two_hosts_is_let_in_when_it_starts_again(start: Start) -> None:
    """By the same command, at the same address. The other holds the state, and had waited for the first one's vote."""
    first = start(needs=TWO)
    second = start(first, needs=TWO)
    epoch = meet([first, second])[0].epoch
    first.close()
    until(lambda: second.why_over(epoch))
    assert propose(second, epoch + 1, step=5) is None
    again = start(needs=TWO, listen=first.address)
    assert again.meet(lambda: None) is None  # the job has begun
    plans: dict[str, Plan] = {}  # that their ranks follow

    def both_train() -> bool:
        for agent, step in ((second, 5), (again, NOT_STARTED)):
            known = plans[agent.name].epoch if agent.name in plans else epoch
            if not _is_in(plans.get(agent.name), again) or agent.why_over(known) or agent.wants_pause(known):
                plan = propose(agent, known + 1, step)
                if plan is not None:
                    plans[agent.name] = plan
        return len(plans) == 2 and all(_is_in(plan, again) for plan in plans.values())

    until(both_train)
    plan = plans[second.name]
    assert plan == plans[again.name]
    assert (plan.step, len(plan.members)) == (5, 2)
    assert (decision := second._council.decision) is not None
    assert decision.holder.member.host == second.name


def _is_in(plan: Plan | None, agent: Agents) -> bool:
    """Whether a rank of this agent's host trains by the plan."""
    return plan is not None and any(member.host == agent.name for member in plan.members)


def test_a_lost_rank_ends_the_membership_everywhere(start: Start) -> None:
    """One host's agent asks for a plan; the others' ranks have to stop, and then all have the same."""
    first = start()
    agents = [first, start(first), start(first)]
    epoch = meet(agents)[0].epoch
    propose(agents[1], epoch + 1, step=3)
    until(lambda: agents[0].why_over(epoch) and agents[2].why_over(epoch))
    assert propose(agents[1], epoch + 1, step=3) is None
    assert len({plan.epoch for plan in meet(agents, epoch + 1, step=3)}) == 1


def test_an_agent_with_another_token_stays_outside(start: Start) -> None:
    """It is told who is missing, with numbers; once before it is given up."""
    first, said = start(needs=TWO), list[str]()
    stranger = start(first, token="other", patience_s=0.5, note=said.append)
    missing = f"no agent of this job answers at 127.0.0.1:{first.address.port}."
    with pytest.raises(LaunchError, match=f"{missing} Start all hosts again"):
        while True:
            propose(stranger)
            time.sleep(0.01)
    assert said == [f"waiting up to 0.5 s for ranks to train with: {missing}"]
    assert "1 of 2 hosts" in first._what_is_missing()


def test_a_host_that_was_out_of_touch_until_the_job_ended_gives_up(start: Start, tmp_path: Path) -> None:
    """The record says so. It had waited for the others' agents, which have ended, for 100 s."""
    said, record = list[str](), JobRecord(tmp_path, "job")
    first = start(needs=TWO)
    second = start(first, needs=TWO, patience_s=1000.0, note=said.append)
    epoch = meet([first, second])[0].epoch
    guest = GuestHosts(Discovery("127.0.0.1", "", 0), 2, 1.0, record)
    second._setting = replace(second._setting, guest=guest)
    first.close()
    with pytest.raises(LaunchError, match=r"ended well on the other hosts, while .* was out of touch"):
        while propose(second, epoch + 1, step=3) is None:
            if said:
                record.end()
            time.sleep(0.01)
    assert "Not heard" in said[0]


class _EnoughError(Exception):
    """The wait has lasted long enough."""


def test_who_has_ended_well_waits_for_the_others(start: Start) -> None:
    """And is not taken for lost when it goes."""
    first = start(needs=TWO)
    second = start(first, needs=TWO)
    epoch = meet([first, second])[0].epoch
    times = iter(range(5))

    def check() -> None:
        if next(times, None) is None:
            raise _EnoughError

    with pytest.raises(_EnoughError):  # the second is not done
        first.finish(check)
    assert not second.why_over(epoch)
    second.finish(lambda: None)
    first.finish(lambda: None)


def test_ranks_of_all_hosts_begin_as_one_world(start: Start) -> None:
    """Numbers by the hosts' names, and one store; each host may have another number of ranks."""
    first = start(needs=TWO)
    second = start(first, needs=TWO)
    store = Address("127.0.0.1", 100)
    assert first.meet(lambda: None) == Begin(0, 3, 0, 2, store)
    assert second.meet(lambda: None) == Begin(1, 3, 1, 2, store)


def test_training_does_not_begin_without_a_host_that_was_there(start: Start) -> None:
    """A script that fails everywhere does not wait for anybody."""
    first = start(needs=TWO)
    second = start(first, needs=TWO)
    first.meet(lambda: None)
    second.meet(lambda: None)
    first.close()
    with pytest.raises(LaunchError, match=f"{first.name} was lost before the ranks had met"):
        until(lambda: second.why_over(NOT_STARTED))


def test_who_starts_again_at_the_end_learns_that_the_job_is_over(start: Start) -> None:
    """Before its ranks are there: it had waited for others to train with, and these for it."""
    first = start(needs=TWO)
    second = start(first, needs=TWO)
    epoch = meet([first, second])[0].epoch
    third = start(first, needs=TWO)
    assert third.meet(lambda: None) is None
    for agent in (first, second):
        with agent._lock:
            agent._council.leave()
    with pytest.raises(LaunchError, match="the job has ended well on the other hosts"):
        until(lambda: third.why_over(NOT_STARTED))
    assert not first.why_over(epoch)
    third.close()
    for agent in (first, second):
        agent.finish(lambda: None)


def test_a_host_none_of_whose_ranks_ended_well_waits_for_nobody(start: Start) -> None:
    """The other has ended well, so nobody is left to train with."""
    first = start(needs=TWO)
    second = start(first, needs=TWO)
    epoch = meet([first, second])[0].epoch
    with first._lock:
        first._council.leave()
    until(second._council.is_all_over)
    assert not second.why_over(epoch)  # a rank that still runs may end well
    with pytest.raises(LaunchError, match=f"ended well on the other hosts, and no rank of {second.name} has"):
        propose(second, epoch + 1)


def test_a_rank_of_another_host_gets_the_state_of_one_that_trains(start: Start) -> None:
    """Over a connection whose ends have proved that they know the token."""
    first = start(needs=TWO)
    assert not first.ask_for_state(lambda _: None)
    second = start(first, needs=TWO)
    meet([first, second])
    third = start(first, needs=TWO)
    third.meet(lambda: None)
    taken: list[socket.socket] = []
    assert third.ask_for_state(lambda end: taken.append(end.dup()))
    given: list[socket.socket] = []
    until(
        lambda: taken and (given or any(given.append(it[0]) for a in (first, second) if (it := a.to_give())))
    )
    with given[0], taken[0]:
        given[0].sendall(b"state")
        assert taken[0].recv(5, socket.MSG_WAITALL) == b"state"


def test_a_shadow_of_another_host_asks_for_a_share(start: Start) -> None:
    """It hears from the agent how many there are, before a rank sends anything."""
    first = start(needs=TWO)
    meet([first, start(first, needs=TWO)])
    with links.call_for_state(first.address, "t", place=3) as asking:
        given: list[tuple[socket.socket, int | None]] = []
        until(lambda: given or given.extend(filter(None, [first.to_give()])))
        with given[0][0] as end:
            assert given[0][1] == 3
            links.tell_about(end, {"epoch": 4})
            end.sendall(b"state")
        assert links.hear_about(asking) == {"epoch": 4}
        assert asking.recv(5, socket.MSG_WAITALL) == b"state"


def test_a_host_that_has_ended_gives_nothing(start: Start) -> None:
    """Nobody would read what is asked there; who asks sees the end, and receives everything later."""
    first = start(needs=TWO)
    meet([first, start(first, needs=TWO)])
    first._council.leave()
    with call_for_state(first.address, "t") as end:
        assert end.recv(1) == b""
    assert first.to_give() is None


def test_a_call_that_is_cut_short_ends_its_own_connection_alone(start: Start) -> None:
    """The caller knows the token, but its frame names no share."""
    first = start(needs=TWO)
    meet([first, start(first, needs=TWO)])
    with socket.create_connection(first.address, 5.0) as end:
        nonce = end.recv(len(GREETING) + NONCE_BYTES, socket.MSG_WAITALL)[len(GREETING) :]
        end.sendall(links.frame_of(b"t", nonce, 0, b"share "))
        assert end.recv(1) == b""
    assert first.to_give() is None
    with links.call_for_state(first.address, "t", place=0):
        pass


def test_an_agent_that_announces_too_much_is_not_read() -> None:
    """A shadow takes no gigabytes for what it is told."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"\xff" * 4)
        with pytest.raises(OSError, match="are the most"):
            links.hear_about(ours)


def test_a_stranger_is_given_nothing(start: Start) -> None:
    """It does not get past the agent: no rank hears of it."""
    first = start(needs=TWO)
    meet([first, start(first, needs=TWO)])
    with pytest.raises(OSError, match=r"closed|reset"):
        call_for_state(first.address, "another token")
    assert first.to_give() is None


def test_what_a_stranger_gives_is_not_taken() -> None:
    """It listens where an agent has been, and does not know the token."""
    with socket.create_server(LOCAL) as server:

        def greet() -> None:
            connected, _ = server.accept()
            with connected:
                connected.sendall(GREETING + bytes(NONCE_BYTES + CODE_BYTES))
                while connected.recv(1000):
                    pass

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(OSError, match="does not know the job's token"):
            call_for_state(Address(*server.getsockname()), "t")
        thread.join()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_agent_that_can_no_longer_talk_says_so(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host does not wait for words that cannot come."""
    agent = start()

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(agent._links, "turn", fail)
    with pytest.raises(LaunchError, match="can no longer talk to the other hosts: ZeroDivisionError"):
        until(lambda: propose(agent) and False)


# ---- links


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Links, Links]]:
    """Two ends. On a busy machine a greeting takes its time, and a connection that is given up loses its frames."""
    monkeypatch.setattr(links, "CONNECT_S", 60.0)
    both = Links(LOCAL, "t"), Links(LOCAL, "t")
    yield both
    for each in both:
        each.close()


def hear(mine: Links, other: Links, number: int = 1) -> list[bytes]:
    bodies: list[bytes] = []

    def turn() -> bool:
        other.turn(0.0, time.monotonic())
        bodies.extend(e.body for e in mine.turn(0.01, time.monotonic()) if isinstance(e, Received))
        return len(bodies) >= number

    until(turn)
    return bodies


def test_frames_arrive_whole_and_in_order(pair: tuple[Links, Links]) -> None:
    """Large ones as well as small ones, however TCP cuts them."""
    mine, other = pair
    bodies = [b"x" * 40_000, b"", b"y" * 900_000, b"z"]
    for body in bodies:
        other.post(mine.address, body, time.monotonic())
    assert hear(mine, other, 4) == bodies


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n" + b"x" * 40, struct.pack("!I", 1 << 30) + bytes(40)]
)
def test_a_stranger_is_dropped_at_its_first_word(pair: tuple[Links, Links], said: bytes) -> None:
    """A frame without the right code, or of a length that no agent's first one has."""
    mine, other = pair
    with socket.create_connection(mine.address) as stranger:
        stranger.sendall(said)
        stranger.settimeout(0.0)
        seen = bytearray()

        def is_closed() -> bool:
            assert not mine.turn(0.01, time.monotonic())
            try:
                part = stranger.recv(100)
            except BlockingIOError:
                return False
            except ConnectionResetError:
                return True
            seen.extend(part)
            return not part

        until(is_closed)
    other.post(mine.address, b"still here", time.monotonic())
    assert hear(mine, other) == [b"still here"]


def test_a_recorded_frame_is_of_no_use(pair: tuple[Links, Links]) -> None:
    """Its code fits one connection, and one place in it."""
    mine, _ = pair
    with socket.create_connection(mine.address) as stranger:
        until(lambda: mine.turn(0.01, time.monotonic()) == [] and len(mine._incoming) == 1)
        nonce = stranger.recv(100)[len(GREETING) :]
        frame = frame_of(b"t", nonce, 0, b"hi")
        stranger.sendall(frame + frame)
        events: list[object] = []
        until(lambda: events.extend(mine.turn(0.01, time.monotonic())) or not mine._incoming)
        assert [type(event) for event in events] == [Received, Stranger, Closed]


def test_the_oldest_strangers_go_first(pair: tuple[Links, Links]) -> None:
    """However many come, an agent gets in."""
    mine, other = pair
    crowd = [socket.create_connection(mine.address) for _ in range(links.MOST_STRANGERS + 9)]
    try:
        other.post(mine.address, b"hello", time.monotonic())
        assert hear(mine, other) == [b"hello"]
        assert len(mine._incoming) <= links.MOST_STRANGERS + 1
        mine.turn(0.0, time.monotonic() + links.PROOF_S + 1)
        assert len(mine._incoming) == 1
    finally:
        for each in crowd:
            each.close()


# ---- words


def packet_of_every_kind() -> Packet:
    """One with a value in every field."""
    candidates = (Candidate(Member("a", 3), 4, 17), Candidate(Member("b", 0)))
    voters = (
        AgentInfo("a", Address("h", 1), Address("h", 2), Address("h", 3), 4, left=(2, 5)),
        AgentInfo("b"),
    )
    decision = Decision(4, candidates, voters, "b", 4, left=(Member("a", 2),))
    promise = Promise(Report(voters[0], candidates), (2, "b"), decision)
    message = Message("promise", "a", "b", 4, (3, "b"), promise, decision)
    return Packet("j", voters[0], 4, True, True, message, "train.py", "--lr 1", 2.5, 1.5, "born")


def test_a_packet_is_read_as_it_was_written() -> None:
    """Every kind of field."""
    for packet in (packet_of_every_kind(), Packet("", AgentInfo("b"), NOT_STARTED)):
        assert decode(encode(packet)) == packet


@pytest.mark.parametrize("body", [b"", b"[]", b"[1,2,3,4,5]", b"{}", b"\xff", b"[" * 100_000])
def test_anything_else_is_refused(body: bytes) -> None:
    """Not read as something that it might mean."""
    with pytest.raises(ProtocolError, match="is no message of an agent"):
        decode(body)


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (b'"promise","a"', b'"shout","a"'),
        (b'"train.py"', b'"train.py\\u001b"'),
        (b'[3,"b"]', b'[3.0,"b"]'),
        (b'[3,"b"]', b"[3]"),
        (b'[3,"b"]', b'"3b"'),
        (b"true,true", b"1,true"),
        (b"[2,5]", b"[2,null]"),
        (b'[["a",3],4,17]', b'[["c",3],4,17]'),
        (b'"b",4,""', b'"c",4,""'),
        (b'"born"]', b'"born",0]'),
    ],
    ids=["kind", "letter", "float", "short", "text", "number", "none", "member", "tie-breaker", "long"],
)
def test_a_packet_with_one_wrong_value_is_refused(was: bytes, now: bytes) -> None:
    """Of another type, unprintable, missing, too many, or of no voter."""
    body = encode(packet_of_every_kind())
    assert was in body
    with pytest.raises(ProtocolError, match="is no message of an agent"):
        decode(body.replace(was, now))
