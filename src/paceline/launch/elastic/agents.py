"""The agents of several hosts: decides with the others who trains on. A thread beside the agent of one host.

Rules
1. The thread reads, answers and sends heartbeats even while the agent is busy. The agent's calls, such as `why_over`
   and `decide`, never block.
2. `council.py` decides what to say and when. `links.py` carries it.
3. One host alone is its own majority, so it needs no thread.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from paceline.comm import TOKEN
from paceline.elastic.discovery import Discovery
from paceline.errors import ConfigurationError, ProtocolError
from paceline.host.addresses import is_loopback
from paceline.launch.elastic.council import Beginning, Council
from paceline.launch.elastic.decision import AgentInfo, Decision
from paceline.launch.elastic.givers import ask_host, call_host
from paceline.launch.elastic.links import (
    Closed,
    Links,
    Received,
    Refused,
    Stranger,
    asks_for_state,
    call_for_state,
)
from paceline.launch.elastic.plan import NOT_STARTED, Address, Decider, Plan, Proposal, Start
from paceline.launch.elastic.record import JobRecord
from paceline.launch.elastic.vote import NEVER, Quorum
from paceline.launch.elastic.wire import Packet, decode, encode
from paceline.launch.launch_errors import LaunchError

_TURN_S = 0.1
_CALL_S = 0.01  # between two calls of an agent that has not heard of a membership yet
_FIND_S = 1.0  # between two questions to the source of addresses, which may be a cluster's controller
_CONFLICT_S = 2.0  # until the other host has heard, too, that the scripts differ
_MOST_SAID = 20  # messages about hosts that do not fit
_SAY_S = 3.0  # that there is no plan, before people are told: who cannot be reached is missed by then


@dataclass(frozen=True)
class GuestHosts:
    """The hosts of a job that an engine starts."""

    discovery: Discovery  # where other agents may be
    least: int  # hosts with which training begins, after
    join_timeout_s: float  # in seconds since this agent has begun
    record: JobRecord | None  # of the job's beginning and end

    def beginning(self, most: int) -> Beginning:
        """Return the conditions for a job of so many hosts at most."""
        began_s, record = time.monotonic(), self.record

        def needs(job: str, num_hosts: int) -> int:
            wanted = self.least if time.monotonic() - began_s > self.join_timeout_s else most
            may = num_hosts >= wanted and (record is None or record.claim(job))
            return wanted if may else NEVER

        return Beginning(needs, lambda: "" if record is None else record.holder())


@dataclass(frozen=True)
class AgentSetting:
    """The name and size of this agent's host."""

    name: str  # what people call its host; agents are sorted by it
    num_ranks: int  # that its host begins with
    start: Address  # where ranks meet that begin with the job, if this is its first host
    listen: Address  # where it listens; port 0 takes a free one
    first: Address | None  # where the job's first agent listens; None: this is the first
    token: str  # the job's
    needs: Quorum  # what training needs
    patience_s: float  # how long to wait for a majority, or for enough ranks
    guest: GuestHosts | None = None  # if an engine starts the hosts: where they are, and when training begins
    script: str = ""  # what the ranks run, if hosts compare it
    arguments: str = ""


@contextlib.contextmanager
def opened(setting: AgentSetting, note: Callable[[str], None], remedy: str) -> Iterator[Agents]:
    """Run this agent among the others. `remedy` says what to do if it cannot listen.

    Raises ConfigurationError without a token that others do not know, or for an address that cannot be listened on.
    """
    at = f"{setting.listen.host}:{setting.listen.port}"
    if not os.environ.get(TOKEN) and not is_loopback(setting.listen.host):
        raise ConfigurationError(
            f"any process that reaches {at} could end the training and get its parameters. Give all hosts the same "
            f"{TOKEN}, a secret such as `openssl rand -hex 16` makes."
        )
    try:
        agents = Agents(setting, note)
    except OSError as error:
        raise ConfigurationError(
            f"the agent of this host cannot listen at {at} ({os.strerror(error.errno or 0)}). {remedy}"
        ) from error
    try:
        yield agents
    finally:
        agents.close()


class Agents(Decider):
    """This agent among the others. Raises OSError if the address is taken or not this host's.

    `note` tells people that there is no plan yet, and what is missing.
    """

    is_alone = False

    def __init__(self, setting: AgentSetting, note: Callable[[str], None] = lambda _: None) -> None:
        self._setting, self._note = setting, note
        self._links = Links(setting.listen, setting.token)
        self.name = f"{setting.name}/{secrets.token_hex(3)}"
        own = AgentInfo(self.name, self._links.address, start=setting.start, num_ranks=setting.num_ranks)
        guest = None if setting.guest is None else setting.guest.beginning(setting.needs.most_hosts)
        self._council = Council(own, setting.needs, setting.first, time.monotonic(), guest)
        self._lock = threading.Lock()
        self._names: dict[int, str] = {}  # of incoming connections
        # To ranks of other hosts, and to shadows, which ask for the states of all ranks here
        self._to_give: deque[tuple[socket.socket, int | None]] = deque()
        self._waits_since_s: float | None = None
        self._has_said_missing = False
        self._recorded = ""  # the record of the job, as it is here
        self._said: set[str] = set()  # about hosts that do not fit
        self._conflict: str | None = None  # a host that runs another script, before training has begun
        self._conflict_s = 0.0  # since when that is known
        self._forgotten: set[str] = set()  # missing agents whose connections are closed
        self._ends = False
        self._broken: BaseException | None = None  # what the thread died of
        self._thread = threading.Thread(target=self._run, name="paceline agents", daemon=True)
        self._thread.start()
        if setting.guest is not None:
            threading.Thread(target=self._discover, args=(setting.guest,), daemon=True).start()

    def _discover(self, guest: GuestHosts) -> None:
        """Look for other agents once a second, and say that this job trains."""
        while not self._ends:
            found: Sequence[Address] = ()
            with contextlib.suppress(OSError):  # nothing is known for now
                guest.discovery.tell(*self.address)
                found = [Address(*each) for each in guest.discovery.find()]
            with self._lock:
                self._council.discovered(found)
                decision, job = self._council.decision, self._council.job
            self._links.wake()
            if guest.record is not None and decision is not None and decision.trained != NOT_STARTED:
                guest.record.touch()
                self._recorded = guest.record.words()
                if guest.record.holder() != job:
                    self._say_apart()
            time.sleep(_FIND_S)

    def _say_apart(self) -> None:
        guest = self._setting.guest
        if guest is not None and guest.record is not None:
            self._say_once(
                f"{guest.record.ended.parent} is not the folder that the other hosts have: their record of this job is "
                "not in it. PACELINE_JOB_FOLDER needs a folder that all hosts share."
            )

    def check_job(self) -> None:
        """Raise LaunchError if the ranks of this host train in a second job, or wait for one that does not answer."""
        with self._lock:
            if self._conflict is not None and time.monotonic() - self._conflict_s > _CONFLICT_S:
                raise LaunchError(self._conflict)
            if self._council.has_rival:
                raise LaunchError(
                    "another job of the same name trains with more ranks, so this one gives up."
                )
            if self._council.is_stranded:
                raise LaunchError("no agent answers of the job that this host waits to join. Start it again.")

    def is_all_over(self) -> bool:
        """Return whether the job has ended well on all other hosts."""
        with self._lock:
            return self._council.is_all_over()

    def is_only_one(self) -> bool:
        """Return whether the newest decision is of this host alone: if it loses its ranks, no other has the state."""
        with self._lock:
            decision = self._council.decision
        return decision is not None and decision.names == (self.name,)

    def is_awaited(self) -> bool:
        """Return whether a host waits to join that needs this one for it: no other has a vote."""
        with self._lock:
            peers = self._council.peers.values()
            others = any(each.agent.name != self.name and not each.is_missing for each in peers)
        return others and self.is_only_one()

    @property
    def address(self) -> Address:
        """Return where it listens."""
        return self._links.address

    # ---- the beginning

    def meet(self, check: Callable[[], None]) -> Start | None:
        """Wait for the other hosts; None: the job has begun before. `check` may end that, LaunchError if too long."""
        began_s = time.monotonic()
        while True:
            check()
            self._check_thread()
            with self._lock:
                decision, start = self._council.decision, self._council.start
                if start is not None:
                    return self._start_by(start)
                if decision is not None and decision.trained != NOT_STARTED:
                    return None
                missing = self._what_is_missing()
            if time.monotonic() - began_s > self._setting.patience_s:
                raise LaunchError(
                    f"the hosts of this launch did not meet in {self._setting.patience_s:.0f} s: {missing} All need "
                    "the same --nnodes and PACELINE_TOKEN, and a way to each other."
                )
            time.sleep(_TURN_S)

    def _start_by(self, decision: Decision) -> Start:
        voters = sorted(decision.voters, key=lambda voter: voter.name)
        host = [voter.name for voter in voters].index(self.name)
        before = sum(voter.num_ranks for voter in voters[:host])
        return Start(before, sum(v.num_ranks for v in voters), host, len(voters), voters[0].start)

    # ---- a Decider

    def decide(self, proposal: Proposal) -> Plan | None:
        """Return a plan as `Decider` says. Raises LaunchError after waiting too long: agents or ranks are missing."""
        self._check_thread()
        now_s = time.monotonic()
        with self._lock:
            plan = self._council.decide(proposal, now_s)
            if plan is None:
                if self._council.is_all_over():
                    raise LaunchError(
                        f"the job has ended well on the other hosts, and no rank of {self.name} has. The messages "
                        "above say why."
                    )
                if self._setting.guest is None or not self._council.is_full:  # else it is a spare
                    self._check_patience(now_s)
            else:
                self._waits_since_s, self._has_said_missing = None, False
        self._links.wake()
        return plan

    def why_over(self, epoch: int) -> str | None:
        self._check_thread()
        with self._lock:
            if self._council.is_all_over() and not self._council.is_member:
                raise self._missed_end()
            if epoch == NOT_STARTED:
                self._check_beginning()
                return None
            if not self._council.is_over(epoch):
                return None
            missing = self._council.missing()
        return (
            f"{', '.join(missing)} is not heard any more"
            if missing
            else "another host asks for other members"
        )

    def wants_pause(self, epoch: int) -> bool:
        with self._lock:
            return self._council.wants_pause(epoch)

    def others_ended(self) -> bool:
        with self._lock:
            return any(peer.is_done for peer in self._council.peers.values())

    def holds_vote(self) -> bool:
        with self._lock:
            is_fit = self._broken is None and not self._council.has_rival
            return is_fit and self._council.holds_vote(time.monotonic())

    def ask_for_state(self, take: Callable[[socket.socket], object]) -> bool:
        with self._lock:
            trainers = self._council.trainers()
        if trainers:
            words = (secrets.choice(trainers), take)
            threading.Thread(target=self._call, args=words, name="paceline call", daemon=True).start()
        return bool(trainers)

    def _call(self, address: Address, take: Callable[[socket.socket], object]) -> None:
        try:
            end = call_for_state(address, self._setting.token)
        except OSError:  # it reads the end at once, and receives everything later
            end, other = socket.socketpair()
            other.close()
        with end:
            take(end)

    def ask_for_shares(self, epoch: int, take: Callable[[int, socket.socket], bool]) -> None:
        calls = threading.Thread(
            target=self._call_all, args=(epoch, take), name="paceline calls", daemon=True
        )
        calls.start()

    def _call_all(self, epoch: int, take: Callable[[int, socket.socket], bool]) -> None:
        """Call every agent whose ranks train, until each has answered in this epoch, that is over, or none is taken."""
        answered, pause_s = set[Address](), _CALL_S
        while waiting := self._trainers_in(epoch) - answered:
            for address in waiting:
                with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as closes:
                    if (told := ask_host(address, self._setting.token)).epoch != epoch or not told.ranks:
                        continue
                    givers, ends = call_host(address, self._setting.token, closes)
                    if givers.epoch == epoch and ends:
                        answered.add(address)
                        if not all(take(rank, end) for rank, end in ends.items()):
                            return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _TURN_S)

    def _trainers_in(self, epoch: int) -> set[Address]:
        with self._lock:
            is_over = self._ends or self._council.is_over(epoch)
            return set() if is_over else {*self._council.trainers()}

    def trainers(self) -> list[Address]:
        with self._lock:
            return self._council.trainers()

    def to_give(self) -> tuple[socket.socket, int | None] | None:
        with self._lock:
            return self._to_give.popleft() if self._to_give else None

    def may_come_in(self) -> bool:
        with self._lock:
            return not self._council.is_full

    def is_spare(self) -> bool:
        with self._lock:
            return self._council.is_full and not self._council.is_member

    def may_leave(self, epoch: int) -> bool | None:
        with self._lock:
            return self._council.may_leave(epoch)

    def _check_beginning(self) -> None:
        """Raise LaunchError if a host that began with this one is lost before training has begun."""
        start, decision = self._council.start, self._council.decision
        if start is None or decision is None or decision.trained != NOT_STARTED:
            return
        lost = sorted(
            set(start.names) & (set(self._council.missing()) | set(start.names) - set(decision.names))
        )
        if lost:
            raise LaunchError(
                f"{', '.join(lost)} was lost before the ranks had met in paceline.Elastic; the ranks of {self.name} "
                "were stopped. The output there says why. Start all hosts again."
            )

    def _missed_end(self) -> LaunchError:
        return LaunchError(
            f"the job has ended well on the other hosts, while {self.name} was out of touch. Nothing is left to do "
            "here."
        )

    def _check_patience(self, now_s: float) -> None:
        if self._waits_since_s is None:
            self._waits_since_s = now_s
        waited_s, limit_s = now_s - self._waits_since_s, self._setting.patience_s
        if waited_s > limit_s:
            raise LaunchError(
                f"{self.name} waited {waited_s:.0f} s for ranks to train with: {self._what_is_missing()} Start all "
                "hosts again, from the last checkpoint."
            )
        if waited_s <= min(_SAY_S, 0.5 * limit_s):
            return
        guest = self._setting.guest
        if guest is not None and guest.record is not None and guest.record.has_ended():
            raise self._missed_end()
        if not self._has_said_missing:
            self._has_said_missing = True
            self._note(f"waiting up to {limit_s:g} s for ranks to train with: {self._what_is_missing()}")

    def _what_is_missing(self) -> str:
        council = self._council
        decision, missing = council.decision, council.missing()
        if decision is None:
            where = ":".join(map(str, self._setting.first or self.address))
            return f"no agent of this job answers at {where}."
        heard = [name for name in decision.names if name not in missing]
        if not council.state.suffices(heard):
            half = 2 * len(heard) == len(decision.names)
            ties = f", and {decision.tie_breaker}, which breaks ties, is missing" if half else ""
            reached = f"{self.name} reaches {len(heard)} of {len(decision.names)} agents{ties}"
            return f"{reached}. Not heard: {', '.join(missing)}."
        needs = self._setting.needs
        if decision.trained == NOT_STARTED:
            least = needs.hosts if self._setting.guest is None else self._setting.guest.least
            return f"{len(heard)} of {least} hosts are here: {', '.join(heard)}."
        return (
            f"fewer than {needs.ranks} ranks (--min-ranks) can train on, or none of them holds the training's state; "
            f"agents: {', '.join(heard)}."
        )

    def _check_thread(self) -> None:
        if self._broken is not None:
            raise LaunchError(
                f"{self.name} can no longer talk to the other hosts: {self._broken!r}"
            ) from self._broken

    # ---- the end

    def finish(self, check: Callable[[], None]) -> None:
        """Wait for other hosts when this host's ranks have ended well: they may need its vote. `check` may raise."""
        with self._lock:
            self._council.leave()
            self._close_given()
        while True:
            check()
            self._check_thread()
            with self._lock:
                if self._council.all_done():
                    break
            time.sleep(_TURN_S)
        time.sleep(_TURN_S)  # so that the others hear it, too

    def close(self) -> None:
        """End the thread and all connections."""
        self._ends = True
        self._links.wake()
        self._thread.join()
        self._close_given()
        self._links.close()

    def _close_given(self) -> None:
        while self._to_give:
            self._to_give.popleft()[0].close()

    # ---- the thread

    def _run(self) -> None:
        try:
            self._talk()
        except BaseException as error:
            self._broken = error
            raise

    def _talk(self) -> None:
        while not self._ends:
            events = self._links.turn(_TURN_S, time.monotonic())
            with self._lock:
                now_s = time.monotonic()
                for event in events:
                    self._take(event, now_s)
                for address, packet in self._council.turn(now_s):
                    script, arguments = self._setting.script, self._setting.arguments
                    known = replace(packet, script=script, arguments=arguments, record=self._recorded)
                    self._links.post(address, encode(known), now_s)
                self._forget_missing()

    def _take(self, event: Received | Refused | Closed | Stranger, now_s: float) -> None:
        if isinstance(event, Refused):
            self._council.refused(event.address, now_s)
        elif isinstance(event, Stranger):
            self._say_once(
                f"a process at {event.host} has another PACELINE_TOKEN or PACELINE_JOB than {self.name}, so they do "
                "not train together. Hosts of one job need the same."
            )
        elif isinstance(event, Closed):
            name = self._names.pop(event.connection, "")
            if name in self._council.peers:
                self._links.forget(self._council.peers[name].agent.address)
                self._council.closed(name, now_s)
        elif asks_for_state(event.body):
            if (given := self._links.hand_over(event.connection, event.body)) is not None:
                self._to_give.append(given)
            if self._council.is_done:
                self._close_given()
        else:
            try:
                packet = decode(event.body)
                if self._fits(packet):
                    self._council.heard(packet, now_s)
                    self._names[event.connection] = packet.sender.name
            except ProtocolError:
                self._links.drop(event.connection)

    def _fits(self, packet: Packet) -> bool:
        """Return whether the sender runs the same script. If not, and the job has not begun, the job ends."""
        mine, theirs = self._setting, packet.sender.name
        if packet.script != mine.script:
            words = (
                f"{theirs} runs {packet.script}, but {self.name} runs {mine.script}: they are no job. Give each job "
                "its own PACELINE_JOB, and all hosts of a job the same script and versions."
            )
            self._say_once(words)
            decision = self._council.decision
            if decision is None or decision.trained == NOT_STARTED:
                self._conflict_s = self._conflict_s or time.monotonic()
                self._conflict = words
            self._council.discovered([packet.sender.address])
            return False
        own, other = self._recorded, packet.record
        if own != other and own.partition(" ")[0] == other.partition(" ")[0]:
            self._say_apart()
        if packet.arguments != mine.arguments:
            self._say_once(
                f"{theirs} has other arguments: {packet.arguments or 'none'}. Those of {self.name}: "
                f"{mine.arguments or 'none'}. If these are two jobs, give each its own PACELINE_JOB."
            )
        return True

    def _say_once(self, words: str) -> None:
        if words not in self._said and len(self._said) < _MOST_SAID:
            self._said.add(words)
            self._note(words)

    def _forget_missing(self) -> None:
        """Close the connections to missing hosts, which are half open. Otherwise the next packet would wait for TCP."""
        missing = {name for name, peer in self._council.peers.items() if peer.is_missing}
        for connection, name in list(self._names.items()):
            if name in missing:
                self._links.drop(connection)
                del self._names[connection]
        for name in missing - self._forgotten:
            self._links.forget(self._council.peers[name].agent.address)
        self._forgotten = missing
