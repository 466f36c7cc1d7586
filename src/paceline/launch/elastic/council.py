"""One agent's part in a job of several hosts: which agents live, when a vote is due, what is sent again.

Rules
1. A voter that was not heard for `SILENCE_S`, or whose host refuses connections, is missing: an attempt is due. A
   wrong suspicion costs one attempt, because all voters are asked and those that answer stay.
2. Wait for every agent that still sends heartbeats, because its ranks may take long to stop. Do not wait for an agent
   that is missing.
3. This host's ranks stop before it promises or proposes. Until then, requests to this agent wait. If no rank was lost,
   the ranks pause between two steps.
4. Survivors see the same loss at once, so they propose one after the other, in the order of the decision.
5. Packets echo when the receiver sent what was heard of it last. An agent holds the vote as long as a quorum has heard
   what it said less than `SILENCE_S` ago: until then they do not count it as missing. So an agent that was stopped
   (SIGSTOP, a suspended machine) holds no vote before they have answered it.
6. Lost hosts are sent the newest decision now and then, at their old addresses. An agent that starts there again joins,
   although it was told to begin a job. It asks to join when its ranks are there, and no rank pauses before.
7. Nothing here reads a clock: time is an argument.
8. A voter has ended for good (rule 8 of `vote.py`) if two things were seen. It closed or refused a connection while it
   was in touch. Since then another agent of the job listens at its address. Before a voter decides anything alone, it
   has to miss this agent for `SILENCE_S`.
9. If an engine starts the hosts, none is the first. Each begins a job of its own. It gives that up for a job that
   trains, or for one with a smaller name. An agent that has promised something in a job of several agents keeps it.
10. Such a job begins to train when `Beginning` says so. Of two that train, that with fewer ranks gives up.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.launch.elastic import vote
from paceline.launch.elastic.decision import AgentInfo, Candidate, Decision
from paceline.launch.elastic.plan import NOT_STARTED, Address, Member, Plan, Proposal
from paceline.launch.elastic.vote import NEVER, NO_BALLOT, Message, Quorum, Report, State
from paceline.launch.elastic.wire import Packet

BEAT_S = 0.5
SILENCE_S = 2.5
REPEAT_S = 0.5  # what is unanswered so long is said again
STAGGER_S = 0.2  # between one proposer and the next
RETRY_S = 2.0  # an attempt that is not decided by then is followed by another
ANYBODY = ""  # who listens at an address, whatever its name
JOINING_S = 10.0  # that the agents of a job may be silent, which this one waits to join
FOUND_S = 4.0  # the same, if they have never answered
PAUSE_S = 1.0  # between two turns: so long this agent did not run itself


@dataclass
class Peer:
    """Another agent, as it was heard last."""

    agent: AgentInfo
    heard_s: float
    epoch: int = NOT_STARTED  # of the newest decision that it knew
    excused_s: float = 0.0  # of its silence: this agent did not run itself
    is_missing: bool = False
    is_done: bool = False
    ended_in_touch: bool = False  # it has closed or refused a connection while it was in touch
    has_paused: bool = False  # or has no rank that trains: then no rank stops within a step for its request
    sent_s: float = 0.0  # by its clock, when it said what was heard last
    knew_s: float = -math.inf  # by this agent's clock: it has heard what this agent said then


@dataclass(frozen=True)
class Beginning:
    """The conditions on which a job begins whose hosts an engine starts.

    `needs` is given a job's name and its number of agents. It returns how many hosts have to bring ranks; `NEVER` if
    the job may not begin. `holder` returns the job that has begun; empty if none has, or there is no record.
    """

    needs: Callable[[str, int], int]
    holder: Callable[[], str]


class Council:
    """The state of one agent in the job: what it knows of the other agents, and which messages it owes them.

    `first` is where the job's first agent listens; None: it is this one. `start` is the first decision of as many hosts
    as the job begins with; None until then. `is_done`: this host's ranks have ended well. `guest` is there if an engine
    starts the hosts: then `first` is None on all of them.
    """

    def __init__(
        self,
        own: AgentInfo,
        needs: Quorum,
        first: Address | None,
        now_s: float,
        guest: Beginning | None = None,
    ) -> None:
        self._guest = guest
        self._adopted_s = now_s
        self._begin_s = now_s  # when to ask again whether training may begin
        self.is_stranded = False  # no agent answers of the job that this one waits to join
        self.has_rival = False  # another job trains with more ranks
        self.job = secrets.token_hex(8) if first is None else ""  # of others it is not known yet
        self.state = vote.begin(Report(own), needs) if first is None else State(Report(own), needs)
        self.peers: dict[str, Peer] = {}
        self.is_done = False
        self.start: Decision | None = None
        self._first = first
        self._has_stopped = True  # its ranks; there are none yet
        self._has_paused = False
        self._wants_vote = False
        self._changed_late = False  # what it has reported is not all
        self._holds: dict[Member, int] = {}  # of which epoch ranks of this host hold the state
        self._waiting: list[Message] = []  # asked while its ranks ran
        self._out: list[tuple[Address, Packet]] = []
        self._addresses: dict[str, Address] = {}  # of all agents ever heard
        self._turn_s = self._beat_s = now_s
        self._due_s = now_s  # when it may propose, or propose again
        self._repeat_s = now_s

    # ---- this host's ranks

    @property
    def own(self) -> AgentInfo:
        return self.state.report.agent

    @property
    def decision(self) -> Decision | None:
        return self.state.decision

    def is_over(self, epoch: int) -> bool:
        """Return whether the ranks that follow this epoch have to stop."""
        decision = self.state.decision
        if decision is None or decision.epoch != epoch:
            return decision is not None and decision.epoch > epoch
        is_urgent = any(not self.peers[message.sender].has_paused for message in self._waiting)
        return is_urgent or self._wants_vote or self.state.promised != NO_BALLOT

    def wants_pause(self, epoch: int) -> bool:
        """Return whether the ranks that follow this epoch have to leave it between two steps."""
        if self._epoch != epoch or self._has_stopped or not self.state.is_voter:
            return False
        return bool(self._waiting or self.state.joiners)

    def decide(self, proposal: Proposal, now_s: float) -> Plan | None:
        """See `Decider`: no rank of this host trains, and `proposal` says which could."""
        plan = self._plan(proposal.epoch)
        if plan is None:
            candidates = tuple(
                self._candidate(member, step) for member, step in sorted(proposal.steps.items())
            )
            self._has_paused = proposal.has_paused
            left = tuple(member.number for member in proposal.left)
            own = replace(self.own, leaves=proposal.leaves, can_save=proposal.can_save, left=left)
            if own != self.own:
                self.state = replace(self.state, report=replace(self.state.report, agent=own))
                self._wants_vote, self._due_s = self.state.is_voter, now_s
            self._report(proposal.store, candidates, now_s)
            plan = self._plan(proposal.epoch)
        if plan is not None:
            self._holds = {member: plan.epoch for member in plan.members if member.host == self.own.name}
            self._has_stopped = not self._holds
            if self._has_stopped:
                self.state = replace(self.state, report=replace(self.state.report, candidates=()))
        return plan

    def _plan(self, epoch: int) -> Plan | None:
        """Return the newest plan, if it is of this epoch or later and no newer epoch is being decided."""
        decision = self.state.decision
        may_follow = self.state.trains or not self.state.is_voter
        plan = None if decision is None or not may_follow else decision.plan()
        return plan if plan is not None and plan.epoch >= epoch else None

    def _candidate(self, member: Member, step: int) -> Candidate:
        known = {each.member: each for each in self.state.report.candidates}.get(member, Candidate(member))
        if step == NOT_STARTED:  # it is new; but with all members new they are equal, and hold what there is
            return known
        return Candidate(member, max(known.epoch, self._holds.get(member, NOT_STARTED)), step)

    def _report(self, store: Address, candidates: tuple[Candidate, ...], now_s: float) -> None:
        changed = candidates != self.state.report.candidates
        self.state = replace(self.state, report=Report(replace(self.own, store=store), candidates))
        if not self._has_stopped or changed:
            self._changed_late = changed and self.state.promised != NO_BALLOT
            if not self._waiting:
                self._wants_vote, self._due_s = True, now_s
        self._has_stopped = True
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            self._take(message, now_s)

    def leave(self) -> None:
        self.is_done = self._has_stopped = True
        self._wants_vote = False
        self.state = replace(self.state, report=Report(replace(self.own, has_ended=True)))
        self._beat_s = 0.0

    @property
    def is_full(self) -> bool:
        """Return whether as many other hosts train as may."""
        return len(self._training_hosts - {self.own.name}) >= self.state.needs.most_hosts

    def may_leave(self, epoch: int) -> bool | None:
        """See `Decider`: a later decision is known to all that stay. Until then its agent's end would be a loss."""
        decision = self.state.decision
        if decision is None or decision.epoch < epoch:
            return None
        if decision.epoch == epoch and self.state.is_voter:
            return None
        stay = [self.peers[name] for name in decision.names if name in self.peers and name != self.own.name]
        if any(not peer.is_missing and peer.epoch < decision.epoch for peer in stay):
            return None
        return decision.saver == self.own.name

    # ---- others

    def heard(self, packet: Packet, now_s: float) -> bool:
        """Take what another agent says; whether it is of this job."""
        if packet.sender.name == self.own.name:  # who has listened here before is invited, too
            return True
        message = packet.message
        asks_to_join = not packet.job and message is not None and message.kind == "join"
        if packet.job != self.job and not asks_to_join and not self._adopts(packet, now_s):
            self._answer_stranger(packet)
            return False
        sender, known = packet.sender, self._epoch
        self._meet(sender, packet, now_s)
        if asks_to_join and not self._is_young:
            self._say(self._newest(sender.name))
            return True  # rule 6
        if message is not None and message.to in (self.own.name, ANYBODY):
            self._take(message, now_s)
        if packet.epoch < known and (message is None or message.kind != "join"):
            self._say(self._newest(sender.name))
        elif packet.epoch > self._epoch:
            self._beat(sender.address)  # it answers with what it knows
        return True

    def _meet(self, sender: AgentInfo, packet: Packet, now_s: float) -> None:
        before = self.peers.get(sender.name)
        self.peers[sender.name] = Peer(
            sender,
            now_s,
            packet.epoch,
            is_done=packet.is_done,
            has_paused=packet.has_paused,
            sent_s=packet.sent_s,
            knew_s=max(packet.heard_s, -math.inf if before is None else before.knew_s),
        )
        names = self._names
        for name in set(names) - self.state.gone - {sender.name}:
            before = self.peers.get(name)
            if before is not None and before.ended_in_touch and before.agent.address == sender.address:
                self.state = vote.bury(self.state, name)
        for name in [
            n for n, address in self._addresses.items() if address == sender.address and n not in names
        ]:
            del self._addresses[name]  # who has listened there before
        self._addresses[sender.name] = sender.address

    def closed(self, name: str, now_s: float) -> None:
        """Send a heartbeat to an agent that has closed its connection: it has ended, or counts this one as missing."""
        peer = self.peers.get(name)
        if peer is not None:
            self._see_end(peer, now_s)
            self._beat(peer.agent.address)

    def refused(self, address: Address, now_s: float) -> None:
        """Count the agent at this address as missing: no process listens there any more."""
        for peer in self.peers.values():
            if peer.agent.address == address and not peer.is_missing:
                self._see_end(peer, now_s)
                peer.is_missing = True
                self._consider(now_s)

    def _see_end(self, peer: Peer, now_s: float) -> None:
        """Note whether the agent was in touch until now (rule 8)."""
        peer.ended_in_touch |= now_s - peer.heard_s <= SILENCE_S and peer.epoch <= self._epoch

    def turn(self, now_s: float) -> list[tuple[Address, Packet]]:
        """Take the actions that are due, and return the packets to send with their addresses."""
        if now_s - self._turn_s > PAUSE_S:
            for peer in self.peers.values():
                peer.excused_s += now_s - self._turn_s
        self._turn_s = now_s
        for peer in self.peers.values():
            peer.is_missing |= now_s - peer.heard_s - peer.excused_s > SILENCE_S
        if now_s >= self._beat_s:
            self._beat_s = now_s + BEAT_S
            self._beat_all()
        self._look_for_others(now_s)
        self._ask_to_begin(now_s)
        self._consider(now_s)
        self._propose(now_s)
        if now_s >= self._repeat_s:
            self._repeat_s = now_s + REPEAT_S
            for message in vote.repeat(self.state):
                self._say(message)
        heard_s = {peer.agent.address: peer.sent_s for peer in self.peers.values()}
        out, self._out = self._out, []
        return [
            (address, replace(packet, sent_s=now_s, heard_s=heard_s.get(address, 0.0)))
            for address, packet in out
        ]

    def missing(self) -> list[str]:
        """Return the voters of the newest decision that do not send heartbeats."""
        return [
            n for n in self._names if n != self.own.name and (n not in self.peers or self.peers[n].is_missing)
        ]

    def trainers(self) -> list[Address]:
        """Return where other agents listen whose ranks train."""
        peers = [self.peers[host] for host in self._training_hosts if host in self.peers]
        return [peer.agent.address for peer in peers if not (peer.is_missing or peer.is_done)]

    def is_all_over(self) -> bool:
        """Return whether the job has ended well on all other hosts."""
        if self.is_done or self._is_young:
            return False
        others = [self.peers.get(name) for name in self._names if name != self.own.name]
        return bool(others) and all(peer is not None and peer.is_done for peer in others)

    @property
    def is_member(self) -> bool:
        return self.own.name in self._training_hosts

    def holds_vote(self, now_s: float) -> bool:
        """Return whether nothing can be decided without this agent, whose ranks hold the newest state."""
        decision = self.state.decision
        if decision is None or decision.trained == NOT_STARTED or not self.state.is_voter:
            return False
        others = [
            self.peers[name] for name in set(decision.names) - set(self.missing()) if name in self.peers
        ]
        heard = {self.own.name, *(peer.agent.name for peer in others if now_s - peer.knew_s <= SILENCE_S)}
        return self.state.suffices(heard) and any(
            each.epoch == decision.trained for each in self.state.report.candidates
        )

    def all_done(self) -> bool:
        """Return whether no agent needs this one any more: all others' ranks have ended well, or they are gone."""
        others = [self.peers[name] for name in self._names if name in self.peers]
        return self.is_done and all(peer.is_done or peer.is_missing for peer in others)

    # ---- within

    @property
    def _names(self) -> tuple[str, ...]:
        return () if self.state.decision is None else self.state.decision.names

    @property
    def _training_hosts(self) -> set[str]:
        members = () if self.state.decision is None else self.state.decision.members
        return {each.member.host for each in members}

    @property
    def _epoch(self) -> int:
        return NOT_STARTED if self.state.decision is None else self.state.decision.epoch

    def _adopts_as_guest(self, guest: Beginning, packet: Packet, now_s: float) -> bool:
        """Return whether this agent gives up its own job for the sender's (rules 9 and 10)."""
        mine, theirs = self.state.decision, None if packet.message is None else packet.message.decision
        if theirs is None or self.own.name in theirs.names:
            return False
        is_training = theirs.trained != NOT_STARTED
        if mine is not None and mine.trained != NOT_STARTED:
            sizes = (len(theirs.members), packet.job), (len(mine.members), self.job)
            self.has_rival |= is_training and sizes[0] > sizes[1]
            return False
        if mine is not None and self.state.promised != NO_BALLOT and len(mine.voters) > 1:
            return False  # that attempt may end in a training
        if not is_training:
            holder = guest.holder()
            if holder == self.job or (holder != packet.job and packet.job >= self.job):
                return False
        self.job, self._first, self._adopted_s = packet.job, packet.sender.address, now_s
        self.state = State(self.state.report, self.state.needs)
        self.peers.clear()
        self._wants_vote, self._has_stopped = False, True
        return True

    def _answer_stranger(self, packet: Packet) -> None:
        """Tell an agent that has to give up its job for this one. It may not know this address."""
        mine, theirs = self.state.decision, None if packet.message is None else packet.message.decision
        if self._guest is None or mine is None or (theirs is not None and theirs.trained != NOT_STARTED):
            return
        if mine.trained != NOT_STARTED or packet.job > self.job:
            self._introduce(packet.sender.address)

    def _introduce(self, address: Address) -> None:
        message = None if self.state.decision is None else self._newest(ANYBODY)
        self._out.append((address, self._packet(message)))

    def discovered(self, addresses: Sequence[Address]) -> None:
        """Tell agents that may listen there what is known here."""
        known = {peer.agent.address for peer in self.peers.values() if not peer.is_missing}
        for address in addresses:
            if address != self.own.address and (address not in known or self.state.decision is None):
                self._introduce(address)

    def _ask_to_begin(self, now_s: float) -> None:
        """Let the first decision have members once training may begin (rule 10)."""
        decision, needs = self.state.decision, self.state.needs
        if self._guest is None or now_s < self._begin_s:
            return
        if decision is None or decision.trained != NOT_STARTED:
            return
        self._begin_s = now_s + REPEAT_S
        hosts = self._guest.needs(self.job, len(decision.voters))
        if hosts != needs.hosts:
            self.state = replace(self.state, needs=replace(needs, hosts=hosts))
            self._wants_vote |= hosts != NEVER and self.state.is_voter

    def _look_for_others(self, now_s: float) -> None:
        """Found a job again if no agent answers of the one that was adopted."""
        if self._guest is None or self.state.is_voter or self.is_done:
            return
        decision = self.state.decision
        if decision is None and now_s - self._adopted_s > FOUND_S:
            self.job, self._first = secrets.token_hex(8), None
            self.state = vote.begin(self.state.report, self.state.needs)
            self._wants_vote, self._due_s = True, now_s
        elif decision is not None:
            # Its ranks may have heard of that job's epochs, so the agent itself begins again.
            heard = [self.peers[name].heard_s for name in decision.names if name in self.peers]
            self.is_stranded = now_s - max([self._adopted_s, *heard]) > JOINING_S

    def _adopts(self, packet: Packet, now_s: float) -> bool:
        """Return whether this agent has nothing to lose, and there is a job that it can join."""
        if self._guest is not None:
            return self._adopts_as_guest(self._guest, packet, now_s)
        mine = self.state.decision
        if mine is None:
            can_join = not self.job and bool(packet.job)
        else:
            theirs = None if packet.message is None else packet.message.decision
            can_join = len(mine.voters) == 1 and mine.trained == NOT_STARTED
            can_join &= theirs is not None and theirs.trained != NOT_STARTED
        if not can_join:
            return False
        self.job = packet.job
        self.state = State(self.state.report, self.state.needs)
        self._first = packet.sender.address
        return True

    def _take(self, message: Message, now_s: float) -> None:
        if message.kind == "ask" and message.decision is not None and message.decision.epoch > self._epoch:
            newer = Message("decision", message.sender, message.to, decision=message.decision)
            self._step(vote.receive(self.state, newer), now_s)
        if message.kind == "ask" and not self._has_stopped and message.epoch == self._epoch:
            self._waiting.append(message)
            return
        promised = self.state.promised
        self._step(vote.receive(self.state, message), now_s)
        if self.state.promised not in (promised, NO_BALLOT):  # to another: that attempt comes first
            self._wants_vote, self._due_s = False, now_s + RETRY_S + STAGGER_S * self._index
        if message.kind == "join":
            self._consider(now_s)

    def _followed_another(self, before: Decision | None, now_s: float) -> None:
        """Drop what belonged to the old decision if there is a new one."""
        decision = self.state.decision
        if decision is before or decision is None:
            return
        self._waiting, self._has_paused = [], False
        in_it = {member.member for member in decision.members}
        # If it trains, its agent lets further ranks in between two steps.
        has_own = self.own.name in {member.host for member in in_it}
        self._wants_vote, self._changed_late = self._changed_late and not has_own, False
        self._due_s = now_s + STAGGER_S
        is_first = decision.trained == NOT_STARTED and len(decision.voters) == self.state.needs.hosts
        if self.start is None and self._guest is None and is_first:
            self.start = decision
        for voter in decision.voters:
            self._addresses[voter.name] = voter.address
            if voter.name != self.own.name:
                self.peers.setdefault(voter.name, Peer(voter, now_s))
        if in_it and not any(each.member in in_it for each in self.state.report.candidates):
            # Others train without its ranks: these bring nothing before its agent says so anew.
            self._has_stopped = True
            if self.state.report.candidates and not self._wants_vote:
                self.state = replace(self.state, report=replace(self.state.report, candidates=()))
        elif in_it and not self.is_done:
            self._has_stopped = False  # they train in a moment, and pause for hosts that ask to join by then
        self._beat_s = now_s

    def _consider(self, now_s: float) -> None:
        """Schedule an attempt if an agent is missing or wants to join."""
        decision = self.state.decision
        if decision is None or not self.state.is_voter or self._wants_vote or self.is_done:
            return  # no rank can train with ranks that have ended
        gone = [name for name in self.missing() if not (name in self.peers and self.peers[name].is_done)]
        for name in self.state.joiners:
            if name in self.peers and self.peers[name].is_missing:
                self.state = replace(self.state, joiners=self.state.joiners - {name})
        if gone or (self.state.joiners and self._has_stopped):  # else its ranks pause first
            self._wants_vote = True
            live = [name for name in decision.names if name not in gone]
            self._due_s = now_s + STAGGER_S * live.index(self.own.name)

    def _propose(self, now_s: float) -> None:
        state = self.state
        if not state.is_voter:
            may_join = self._guest is None or not self.is_full
            if may_join and self._has_stopped and (state.report.candidates or self._is_young):
                self._ask_to_join(now_s)
            return
        leads = state.own != NO_BALLOT and state.own >= state.promised
        waits_for_missing = all(
            name not in self.peers or self.peers[name].is_missing for name in state.unanswered
        )
        if leads and state.offered is None and waits_for_missing:
            self._step(vote.lose_patience(self.state), now_s)
        is_stale = state.promised != NO_BALLOT and not leads
        if now_s < self._due_s or not self._has_stopped or not (self._wants_vote or is_stale):
            return
        if leads and (state.unanswered - set(self.missing())):
            return  # an agent that sends heartbeats has not stopped its ranks yet
        self._due_s = now_s + RETRY_S + STAGGER_S * self._index
        self._step(vote.suspect(self.state), now_s)

    @property
    def _index(self) -> int:
        return self._names.index(self.own.name) if self.state.is_voter else 0

    @property
    def _is_young(self) -> bool:
        return self.state.decision is None or self.state.decision.trained == NOT_STARTED

    def _ask_to_join(self, now_s: float) -> None:
        if now_s < self._due_s:
            return
        self._due_s = now_s + REPEAT_S
        if self.state.decision is None:
            if self._first is not None:  # whose name is not known
                self._out.append((self._first, self._packet(Message("join", self.own.name, ANYBODY))))
            return
        self._apply(vote.ask_to_join(self.state, self.state.decision.names))

    def _step(self, result: vote.Result, now_s: float) -> None:
        before = self.state.decision
        self._apply(result)
        self._followed_another(before, now_s)

    def _apply(self, result: vote.Result) -> None:
        self.state, messages = result
        for message in messages:
            self._say(message)

    def _say(self, message: Message) -> None:
        address = self._addresses.get(message.to)
        if address is not None:
            self._out.append((address, self._packet(message)))

    def _newest(self, to: str) -> Message:
        return Message("decision", self.own.name, to, decision=self.state.decision)

    def _packet(self, message: Message | None = None) -> Packet:
        has_paused = self._has_paused or not self.is_member
        return Packet(self.job, self.own, self._epoch, self.is_done, has_paused, message)

    def _beat(self, address: Address) -> None:
        self._out.append((address, self._packet()))

    def _beat_all(self) -> None:
        for name, address in self._addresses.items():
            if name in self._names:
                self._beat(address)
            elif not self._is_young and self.state.is_voter:
                self._introduce(address)
