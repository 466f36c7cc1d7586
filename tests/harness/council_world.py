"""Councils of several hosts in one process: a network that can be cut, and time that is told. No sockets, no clocks."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field, replace

from paceline.launch.elastic.council import Beginning, Council
from paceline.launch.elastic.decision import AgentInfo
from paceline.launch.elastic.plan import NOT_STARTED, Address, Member, Plan, Proposal
from paceline.launch.elastic.vote import NEVER, Quorum
from paceline.launch.elastic.wire import Packet, decode, encode

_TURN_S = 0.05
_DELAY_S = 0.001
_STOP_S = 0.02  # until ranks have stopped
_STEP_S = 0.1


@dataclass
class Host:
    """An agent and its ranks. The ranks train a step whenever all members of their plan do."""

    council: Council
    members: list[Member]
    address: Address
    plan: Plan | None = None  # that its ranks follow
    stops_s: float | None = None  # when they will have stopped
    steps: dict[Member, int] = field(default_factory=dict)
    is_frozen: bool = False
    is_dead: bool = False
    has_paused: bool = False  # its ranks stop, or have stopped, between two steps
    num_stops: int = 0  # times that they had to stop within one
    step_s: float = _STEP_S  # that they take to the end of one
    is_told: bool = False  # to leave
    slow_s: float = 0.0  # that its agent takes to see a new decision
    known: tuple[int, float] = (NOT_STARTED, 0.0)  # the newest one, and when the council learned of it
    found_s: float = 0.0  # when it looks for other hosts again, if an engine has started it

    @property
    def epoch(self) -> int:
        return NOT_STARTED if self.plan is None else self.plan.epoch

    @property
    def trains(self) -> bool:
        return self.plan is not None and self.stops_s is None and bool(self.steps)


class World:
    """The hosts of a council, of which the first begins the job.

    Args:
        num_hosts: Number of hosts.
        needs: How many ranks a plan needs; each host has one.
        least: If an engine starts the hosts: with how many training begins. None of them is the first then.
        has_record: Whether a folder that all hosts reach, whatever is cut, holds the record of the job.
    """

    def __init__(
        self, num_hosts: int, needs: Quorum, least: int | None = None, has_record: bool = False
    ) -> None:
        self.least, self.holder = least, ""
        self._has_record = has_record
        self.now_s = 0.0
        self.needs = needs
        self.hosts: list[Host] = []
        self.cut: set[int] = set()
        self.history: list[tuple[float, int, int]] = []  # time, epoch, step completed
        self._numbers = itertools.count()
        self._flying: list[tuple[float, int, Address, bytes]] = []
        self._step_s = 0.0
        for i in range(num_hosts):
            self.start(i)

    def start(self, place: int) -> None:
        """Begin the agent of a host, for the first time or again. On the first host it begins the job.

        If an agent is there, it has just died: the others' connections to it are closed.
        """
        number = next(self._numbers)
        name, address = f"{place}-{number}", Address(f"host{place}", 1)
        first = None if place == 0 else Address("host0", 1)
        if self.least is None:
            council = Council(AgentInfo(name, address), self.needs, first, self.now_s)
        else:
            address = Address(f"host{place}", number + 1)  # another one at each start
            needs = replace(self.needs, hosts=NEVER)
            guest = Beginning(self._needed, lambda: self.holder)
            council = Council(AgentInfo(name, address), needs, None, self.now_s, guest)
        host = Host(council, [Member(name, 0)], address)
        host.steps = {Member(name, 0): NOT_STARTED}
        before = self.hosts[place : place + 1]
        self.hosts[place : place + 1] = [host]
        for other, each in enumerate(self.hosts):
            if before and not (before[0].is_dead or {place, other} & self.cut or other == place):
                each.council.closed(before[0].council.own.name, self.now_s)

    def _needed(self, job: str, num_hosts: int) -> int:
        least = self.least or 0
        if num_hosts < least:
            return NEVER
        if self._has_record:
            self.holder = self.holder or job
        return least if self.holder in ("", job) else NEVER

    def run(self, seconds: float) -> None:
        """Let time pass."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += _TURN_S
            for place, host in enumerate(self.hosts):
                if not host.is_dead and not host.is_frozen:
                    self._turn(place, host)
            self._deliver()
            self._train()
            self._check_votes()

    def _turn(self, place: int, host: Host) -> None:
        if self.least is not None and self.now_s >= host.found_s:
            host.found_s = self.now_s + 1.0
            host.council.discovered([each.address for each in self.hosts])
        for _ in range(3):  # what it says to itself about itself takes no time
            self._live(host)
            for address, packet in host.council.turn(self.now_s):
                self._send(place, address, packet)

    def _send(self, place: int, address: Address, packet: Packet) -> None:
        to = int(address.host.removeprefix("host"))
        if self.hosts[to].is_dead or self.hosts[to].address != address:
            if not {place, to} & self.cut:
                self.hosts[place].council.refused(address, self.now_s)
            return
        if not {place, to} & self.cut:
            heapq.heappush(
                self._flying, (self.now_s + _DELAY_S, next(self._numbers), address, encode(packet))
            )

    def _deliver(self) -> None:
        """Deliver the arrived messages and their answers, as within a few milliseconds."""
        kept = []
        for _ in range(2000):
            if not self._flying:
                break
            item = heapq.heappop(self._flying)
            place = int(item[2].host.removeprefix("host"))
            host = self.hosts[place]
            if host.is_frozen:
                kept.append(item)
            elif not host.is_dead:
                host.council.heard(decode(item[3]), self.now_s)
                self._live(host)
                for address, packet in host.council.turn(self.now_s):
                    self._send(place, address, packet)
        self._flying = kept

    def _live(self, host: Host) -> None:
        """Run the agent of one host."""
        newest = NOT_STARTED if host.council.decision is None else host.council.decision.epoch
        host.known = (newest, self.now_s) if newest > host.known[0] else host.known
        if self.now_s < host.known[1] + host.slow_s:
            return
        is_in_step = host.trains or (
            host.has_paused and host.stops_s is not None and self.now_s < host.stops_s
        )
        if host.council.is_over(host.epoch) and is_in_step:
            host.stops_s, host.has_paused = self.now_s + _STOP_S, False
            host.num_stops += 1
        if (host.council.wants_pause(host.epoch) or host.is_told) and host.trains:
            host.stops_s, host.has_paused = self.now_s + host.step_s, True
        waits = host.plan is None or (host.stops_s is not None and self.now_s >= host.stops_s)
        is_out = host.plan is not None and not any(m.host == host.council.own.name for m in host.plan.members)
        if not (waits or is_out):
            return
        if host.council.decision is not None and host.plan is not None and self._is_fenced(host):
            host.members = [Member(host.council.own.name, next(self._numbers))]
            host.steps = {host.members[0]: NOT_STARTED}
        store = Address(host.address.host, 2)
        if host.is_told:
            host.steps = {}
        left = tuple(host.members) if host.is_told else ()
        proposal = Proposal(
            host.epoch + 1, dict(host.steps), store, host.has_paused, host.is_told, host.is_told, left
        )
        plan = host.council.decide(proposal, self.now_s)
        if plan is not None:
            host.plan, host.stops_s = plan, None
            host.steps = {m: plan.step if m in plan.members else s for m, s in host.steps.items()}

    def _is_fenced(self, host: Host) -> bool:
        """Return whether its ranks are outside a decision by which others train."""
        decision = host.council.decision
        assert decision is not None
        names = {candidate.member for candidate in decision.members}
        return decision.epoch > host.epoch and bool(names) and not names & set(host.members)

    def _train(self) -> None:
        if self.now_s < self._step_s:
            return
        self._step_s = self.now_s + _STEP_S
        for plan in {host.plan for host in self.hosts if host.plan is not None}:
            here = [h for h in self.hosts if h.plan is plan or h.plan == plan]
            present = {m for h in here if h.trains and not h.is_dead for m in h.members}
            if plan.members and set(plan.members) <= present:
                step = max(plan.step, *(h.steps[m] for h in here for m in h.members if m in plan.members)) + 1
                for host in here:
                    host.steps = {m: step if m in plan.members else s for m, s in host.steps.items()}
                self.history.append((self.now_s, plan.epoch, step))

    def _check_votes(self) -> None:
        """Check that a host that may write a checkpoint now has the newest step."""
        for host in self.hosts:
            if not (host.is_dead or host.is_frozen) and host.council.holds_vote(self.now_s):
                assert not (self.history and host.steps) or max(host.steps.values()) >= self.history[-1][2]

    # ---- what is expected

    def check(self) -> None:
        """Check that steps were made one after the other, each in one epoch, and that epochs only grew."""
        epochs = [epoch for _, epoch, _ in self.history]
        assert epochs == sorted(epochs), self.history
        steps = [step for _, _, step in self.history]
        assert steps == list(range(steps[0], steps[0] + len(steps))), self.history

    def training(self) -> set[int]:
        """Return the hosts whose ranks have just completed the last step."""
        if not self.history or self.now_s - self.history[-1][0] > 3 * _STEP_S:
            return set()
        last = self.history[-1][2]
        return {i for i, h in enumerate(self.hosts) if last in h.steps.values() and not h.is_dead}

    def longest_stall_s(self) -> float:
        times = [at for at, _, _ in self.history]
        return max(b - a for a, b in itertools.pairwise(times))
