"""The vote on the next decision: a pure function from (state, event) to (state, messages). No sockets, no clocks.

Rules
1. The decision after epoch e is made by the voters of e alone: more than half of them, or exactly half with e's
   tie-breaker. With two hosts, the one that breaks ties suffices.
2. Attempts at a decision have ballots (number, proposer). A voter promises a ballot once, to its proposer, and none
   below it afterwards. Its ranks have stopped before: so it can say what they hold, and what it has accepted.
3. A proposer needs the promises of a quorum, its own among them. It offers the decision that was accepted under the
   highest ballot, if there is one. Otherwise it offers a decision with the agents that answered, itself among them.
4. What a quorum has accepted is decided. An agent that is told goes on to the next epoch. An agent that is not in the
   decision is fenced: every message of an older epoch is answered by the newest decision and by nothing else.
5. An agent that wants to join is asked like a voter, and its answer counts for no quorum. It becomes a voter by the
   decision of an attempt that it answered. So a delayed request of a host that has died since makes no voter.
6. A decision has members only if one of them trained in the newest epoch that had members. That one has stopped there,
   so there is never a second training. With `Quorum.begins_anew`, new ranks begin anew if all others were lost. Each
   host of that epoch has to have said that it has no rank of it any more, or to have ended for good.
7. An agent that lost its memory is another one: it comes with another name. So nothing is kept on disk.
8. All voters that have not ended for good suffice, whatever the quorum. A voter has ended for good if it had decided
   nothing that the others do not know: so what a quorum of ended voters may have decided was trained by no rank.
9. A voter that was told to end is in the next decision only if all were told. So its end is no loss.

Paxos for one value an epoch (Lamport 1998, "The part-time parliament"), its acceptors chosen by the epoch before. The
tie-breaker is that of Jajodia and Mutchler 1990, "Dynamic voting algorithms". Explored by
`tests/launch/elastic/test_vote.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from paceline.launch.elastic.decision import AgentInfo, Candidate, Decision
from paceline.launch.elastic.plan import NOT_STARTED, Member

Ballot = tuple[int, str]  # number, proposer
Kind = Literal["ask", "promise", "offer", "vote", "decision", "join"]
NO_BALLOT: Ballot = (0, "")
NEVER = 1 << 30  # hosts: so many there are not


@dataclass(frozen=True)
class Report:
    """The agent and ranks that a host brings into a decision."""

    agent: AgentInfo  # its agent
    candidates: tuple[Candidate, ...] = ()  # its ranks that could train now

    def holds(self, epoch: int) -> bool:
        """Return whether a rank has the state of this epoch."""
        return any(candidate.epoch == epoch for candidate in self.candidates)


@dataclass(frozen=True)
class Quorum:
    """The hosts or ranks without which a decision has no members."""

    hosts: int = 1  # in the first one that has: how many hosts bring ranks
    ranks: int = 1  # how many ranks there are
    most_hosts: int = NEVER  # how many hosts there are at most; a further one waits
    begins_anew: bool = False  # whether new ranks begin anew if all others were lost

    def is_full(self, decision: Decision) -> bool:
        """Return whether no further host may train by it."""
        return len({each.member.host for each in decision.members}) >= self.most_hosts


@dataclass(frozen=True)
class Promise:
    """A voter's answer to an attempt."""

    report: Report  # what its host brings
    ballot: Ballot  # under which it has accepted `decision`; `NO_BALLOT`: it has accepted none
    decision: Decision | None


@dataclass(frozen=True)
class State:
    """The state of the vote at one agent."""

    report: Report  # what its host would bring; the agent keeps it up to date
    needs: Quorum = Quorum()  # what a decision needs to have members
    # the newest that it knows to be decided; None for an agent that has not heard of any
    decision: Decision | None = None
    # the highest ballot for the decision after `decision`; `NO_BALLOT`: none, so its ranks train
    promised: Ballot = NO_BALLOT
    accepted: Ballot = NO_BALLOT  # under which ballot it has accepted `accepted_decision`
    accepted_decision: Decision | None = None
    own: Ballot = NO_BALLOT  # the ballot of the attempt that it leads; `NO_BALLOT`: none
    promises: frozenset[Promise] = frozenset()  # what this attempt was answered
    offered: Decision | None = None  # what was offered in it
    votes: frozenset[str] = frozenset()  # the names of voters that accepted that
    joiners: frozenset[str] = frozenset()  # the names of agents that asked to join
    gone: frozenset[str] = frozenset()  # the names of voters of `decision` that have ended for good

    @property
    def name(self) -> str:
        return self.report.agent.name

    @property
    def is_voter(self) -> bool:
        return self.decision is not None and self.name in self.decision.names

    @property
    def trains(self) -> bool:
        """Return whether its ranks in the decision may train."""
        return self.is_voter and self.promised == NO_BALLOT

    @property
    def unanswered(self) -> frozenset[str]:
        """Return the agents that were asked in its attempt and have not answered."""
        if self.decision is None or self.own == NO_BALLOT or self.offered is not None:
            return frozenset()
        answered = {promise.report.agent.name for promise in self.promises}
        return (frozenset(self.decision.names) | self.joiners) - answered - self.gone

    def suffices(self, names: Iterable[str]) -> bool:
        """Return whether these voters can decide on the next decision (rules 1 and 8)."""
        decision, voting = self.decision, frozenset(names)
        return decision is not None and (
            decision.has_quorum(voting) or voting | self.gone >= set(decision.names)
        )


@dataclass(frozen=True)
class Message:
    """A message from one agent to another."""

    kind: Kind  # a question, its answer, or `decision`: one that is decided
    sender: str
    to: str
    epoch: int = NOT_STARTED  # that is to be followed by another, if the kind belongs to one
    ballot: Ballot = NO_BALLOT
    promise: Promise | None = None
    decision: Decision | None = None  # of `ask` the one of this epoch, of `offer` the next


Result = tuple[State, tuple[Message, ...]]


def begin(report: Report, needs: Quorum) -> State:
    """Return the state of the first agent of a job. It decides alone until others have joined."""
    return State(report, needs, Decision(0, (), (report.agent,), report.agent.name))


# ---- events from inside


def suspect(state: State) -> Result:
    """Lead an attempt at the next decision: an agent is missing or wants to join. This host's ranks have stopped."""
    decision = state.decision
    if decision is None or not state.is_voter:
        return state, ()
    own = (state.promised[0] + 1, state.name)
    state = replace(state, own=own, promises=frozenset(), offered=None, votes=frozenset())
    asked = [*decision.names, *sorted(state.joiners)]
    return _hear_own(
        state, [Message("ask", state.name, to, decision.epoch, own, decision=decision) for to in asked]
    )


def lose_patience(state: State) -> Result:
    """Offer a decision without the agents that have not answered yet. Do nothing without a quorum."""
    decision = state.decision
    reports = {promise.report.agent.name: promise.report for promise in state.promises}
    can_offer = state.offered is None and state.name in reports and state.suffices(reports)
    if decision is None or not can_offer:
        return state, ()
    newest = max(state.promises, key=lambda promise: promise.ballot)
    offered = newest.decision or next_decision(decision, list(reports.values()), state.needs, state.gone)
    state = replace(state, offered=offered)
    offers = [
        Message("offer", state.name, to, decision.epoch, state.own, decision=offered) for to in decision.names
    ]
    return _hear_own(state, offers)


def repeat(state: State) -> tuple[Message, ...]:
    """Return the messages of its attempt that are unanswered, to send again: they or the answers may be lost."""
    if state.decision is None or state.own == NO_BALLOT or state.own < state.promised:
        return ()
    kind: Kind = "ask" if state.offered is None else "offer"
    decision = state.offered or state.decision
    to = state.unanswered if state.offered is None else frozenset(state.decision.names) - state.votes
    return tuple(
        Message(kind, state.name, each, state.decision.epoch, state.own, decision=decision)
        for each in sorted(to)
    )


def bury(state: State, name: str) -> State:
    """Note that a voter has ended for good (rule 8)."""
    return replace(state, gone=state.gone | {name})


def ask_to_join(state: State, names: tuple[str, ...]) -> Result:
    """Ask voters to be let in; to be repeated until a decision names this agent."""
    return state, tuple(Message("join", state.name, name) for name in names)


def _hear_own(state: State, messages: list[Message]) -> Result:
    """Deliver an agent's messages to itself at once, and return the others."""
    out: list[Message] = []
    while messages:
        message = messages.pop(0)
        if message.to == state.name:
            state, more = receive(state, message)
            messages.extend(more)
        else:
            out.append(message)
    return state, tuple(out)


# ---- the decision that is offered


def next_decision(
    decision: Decision, reports: list[Report], needs: Quorum, gone: frozenset[str] = frozenset()
) -> Decision:
    """Make the decision with the agents that answered. Old voters and ranks keep their order, before new ones."""
    places = {name: place for place, name in enumerate(decision.names)}
    ranks = {candidate.member: place for place, candidate in enumerate(decision.members)}
    voters = sorted(
        (r.agent for r in reports), key=lambda voter: (places.get(voter.name, len(places)), voter.name)
    )
    # A host whose ranks left before the last membership may still say that it can save.
    last = {each.member.host for each in decision.members}
    savers = [voter.name for voter in voters if voter.can_save and voter.name in last]
    voters = [voter for voter in voters if not voter.leaves] or voters
    bring = {r.agent.name for r in reports if r.candidates}  # others give way to a host that waits with ranks
    kept = {v.name for v in sorted(voters, key=lambda each: each.name not in bring)[: needs.most_hosts]}
    voters = [voter for voter in voters if voter.name in kept]
    found = [each for report in reports if report.agent.name in kept for each in report.candidates]
    members = sorted(
        found, key=lambda one: (ranks.get(one.member, len(ranks)), one.step == NOT_STARTED, one.member)
    )
    is_first = decision.trained == NOT_STARTED
    num_hosts = len({one.member.host for one in members})
    enough = len(members) >= needs.ranks and (num_hosts >= needs.hosts or not is_first)
    keepers = set(decision.keepers) | {each.member.host for each in decision.members}
    keepers -= gone | {r.agent.name for r in reports if not (r.agent.has_ended or r.holds(decision.trained))}
    # A checkpoint of a rank that has left is newer than what ranks that wait have loaded.
    begins_anew = needs.begins_anew and not (keepers or savers or decision.saver)
    holds_state = any(member.epoch == decision.trained for member in members)
    if not enough or not (is_first or holds_state or begins_anew):
        members = []
    names = [voter.name for voter in voters]
    return Decision(
        decision.epoch + 1,
        tuple(members),
        tuple(voters),
        decision.tie_breaker if decision.tie_breaker in names else names[0],
        decision.epoch + 1 if members else decision.trained,
        "" if members or is_first else next(iter(savers), decision.saver),
        tuple(Member(r.agent.name, number) for r in reports for number in r.agent.left),
        () if members else tuple(sorted(keepers)),
    )


# ---- messages


def receive(state: State, message: Message) -> Result:
    """Hear a message. Loss, delay, repetition and any order are allowed."""
    if message.kind == "join":
        decision = state.decision  # that the sender has not heard of, if it is in there or there is no room
        if decision is not None and (message.sender in decision.names or state.needs.is_full(decision)):
            return state, (Message("decision", state.name, message.sender, decision=decision),)
        return (replace(state, joiners=state.joiners | {message.sender}) if state.is_voter else state), ()
    if message.kind in ("decision", "ask"):
        state = _learn(state, message.decision)
    if message.kind == "decision" or state.decision is None or message.epoch > state.decision.epoch:
        return state, ()
    if message.epoch < state.decision.epoch:
        return state, (Message("decision", state.name, message.sender, decision=state.decision),)
    return _HANDLERS[message.kind](state, message)


def _asked(state: State, message: Message) -> Result:
    if state.is_voter:
        if message.ballot < state.promised or message.ballot == state.accepted:
            return state, ()  # the same once more is answered: the first answer may have been lost
        state = replace(state, promised=message.ballot)
    promise = Promise(state.report, state.accepted, state.accepted_decision)
    return state, (Message("promise", state.name, message.sender, message.epoch, message.ballot, promise),)


def _promised(state: State, message: Message) -> Result:
    if message.ballot != state.own or state.offered is not None or message.promise is None:
        return state, ()
    state = replace(state, promises=state.promises | {message.promise})
    return (state, ()) if state.unanswered else lose_patience(state)


def _offered(state: State, message: Message) -> Result:
    if message.ballot < state.promised or not state.is_voter:
        return state, ()
    state = replace(
        state, promised=message.ballot, accepted=message.ballot, accepted_decision=message.decision
    )
    return state, (Message("vote", state.name, message.sender, message.epoch, message.ballot),)


def _voted(state: State, message: Message) -> Result:
    if message.ballot != state.own or state.offered is None or state.decision is None:
        return state, ()
    before, decision = state.decision, state.offered
    state = replace(state, votes=state.votes | {message.sender})
    if not state.suffices(state.votes):
        return state, ()
    told = sorted({*before.names, *decision.names} - {state.name})
    return _learn(state, decision), tuple(
        Message("decision", state.name, to, decision=decision) for to in told
    )


def _learn(state: State, decision: Decision | None) -> State:
    if decision is None or (state.decision is not None and decision.epoch <= state.decision.epoch):
        return state
    report = state.report
    if decision.members:
        report = replace(report, candidates=tuple(decision.updated(each) for each in report.candidates))
    # Agents that still want to join ask again. Otherwise ranks would pause again and again for one without a place.
    return State(report, state.needs, decision)


_HANDLERS = {"ask": _asked, "promise": _promised, "offer": _offered, "vote": _voted}
