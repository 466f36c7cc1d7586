"""The vote on the next decree: a pure function from (state, event) to (state, messages). No sockets, no clocks.

Rules
1. The decree after epoch e is decided by the voters of e alone: more than half of them, or exactly half with e's
   tie-breaker. With two hosts: whatever set has the tie-breaker.
2. Attempts at a decree have ballots (number, proposer). A voter promises a ballot once, to its proposer, and none below
   it afterwards. Before it promises, its ranks have stopped; so it can say what they hold, and what it has accepted.
3. A proposer with the promises of a quorum, its own among them, offers what was accepted under the highest ballot, if
   anything was. Otherwise it offers a decree of those that answered, itself among them.
4. What a quorum has accepted is decided. Who is told goes on to the next epoch. Who is not in it is fenced: every
   message of an older epoch is answered by the newest decree and by nothing else.
5. Who wants to join is asked like a voter, and its answer counts for no quorum. It becomes a voter by the decree of an
   attempt that it answered: a delayed wish of a host that has died since makes no voter.
6. A decree has members only if one of them trained in the newest epoch that had members. That one has stopped there, so
   there is never a second training, and never one that begins anew.
7. An agent that lost its memory is another one: it comes with another name. So nothing is kept on disk.
8. All voters that have not ended for good suffice, whatever the quorum. A voter has ended for good if it had decided
   nothing that the others do not know: so what a quorum of ended voters may have decided was trained by no rank.
9. A voter that was told to end is in the next decree only if all were told. So its end is no loss.

Single-decree Paxos an epoch (Lamport 1998, "The part-time parliament"), its acceptors chosen by the epoch before. The
tie-breaker is that of Jajodia and Mutchler 1990, "Dynamic voting algorithms". Explored by
`tests/launch/elastic/test_vote.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from paceline.launch.elastic.decree import Candidate, Decree, Voter
from paceline.launch.elastic.plan import NOT_STARTED

Ballot = tuple[int, str]  # number, proposer
NO_BALLOT: Ballot = (0, "")
NEVER = 1 << 30  # hosts: so many there are not


@dataclass(frozen=True)
class Report:
    """The agent and ranks that a host brings into a decree."""

    voter: Voter  # its agent
    candidates: tuple[Candidate, ...] = ()  # its ranks that could train now


@dataclass(frozen=True)
class Quorum:
    """The hosts or ranks without which a decree has no members."""

    hosts: int = 1  # in the first one that has: how many hosts bring ranks
    ranks: int = 1  # how many ranks there are
    most_hosts: int = NEVER  # how many hosts there are at most; a further one waits


@dataclass(frozen=True)
class Promise:
    """A voter's answer to an attempt."""

    report: Report  # what its host brings
    ballot: Ballot  # under which it has accepted `decree`; `NO_BALLOT`: it has accepted none
    decree: Decree | None


@dataclass(frozen=True)
class State:
    """One agent's."""

    report: Report  # what its host would bring; the agent keeps it up to date
    needs: Quorum = Quorum()  # what a decree needs to have members
    # the newest that it knows to be decided; None for an agent that has not heard of any
    decree: Decree | None = None
    # the highest ballot for the decree after `decree`; `NO_BALLOT`: none, so its ranks train
    promised: Ballot = NO_BALLOT
    accepted: Ballot = NO_BALLOT  # under which ballot it has accepted `accepted_decree`
    accepted_decree: Decree | None = None
    own: Ballot = NO_BALLOT  # the ballot of the attempt that it leads; `NO_BALLOT`: none
    promises: frozenset[Promise] = frozenset()  # what this attempt was answered
    offered: Decree | None = None  # what was offered in it
    votes: frozenset[str] = frozenset()  # the names of voters that accepted that
    joiners: frozenset[str] = frozenset()  # the names of agents that asked to join
    gone: frozenset[str] = frozenset()  # the names of voters of `decree` that have ended for good

    @property
    def name(self) -> str:
        return self.report.voter.name

    @property
    def is_voter(self) -> bool:
        return self.decree is not None and self.name in self.decree.names

    @property
    def trains(self) -> bool:
        """Return whether its ranks in the decree may train."""
        return self.is_voter and self.promised == NO_BALLOT

    @property
    def unanswered(self) -> frozenset[str]:
        """The agents that were asked in its attempt and have not answered."""
        if self.decree is None or self.own == NO_BALLOT or self.offered is not None:
            return frozenset()
        answered = {promise.report.voter.name for promise in self.promises}
        return (frozenset(self.decree.names) | self.joiners) - answered - self.gone

    def suffices(self, names: Iterable[str]) -> bool:
        """Return whether these voters can decide on the next decree (rules 1 and 8)."""
        decree, voting = self.decree, frozenset(names)
        return decree is not None and (decree.has_quorum(voting) or voting | self.gone >= set(decree.names))


@dataclass(frozen=True)
class Message:
    """A message from one agent to another.

    Attributes:
        kind: `ask` and `promise`, `offer` and `vote`, `decree` (one that is decided), or `join`.
        epoch: The one that is to be followed by another; `NOT_STARTED` for a kind that belongs to none.
        decree: Of `ask` the one of this epoch, of `offer` the next.
    """

    kind: str
    sender: str
    to: str
    epoch: int = NOT_STARTED
    ballot: Ballot = NO_BALLOT
    promise: Promise | None = None
    decree: Decree | None = None


Result = tuple[State, tuple[Message, ...]]


def begin(report: Report, needs: Quorum) -> State:
    """The state of the first agent of a job: it decides alone until others have joined."""
    return State(report, needs, Decree(0, (), (report.voter,), report.voter.name))


# ---- events from inside


def suspect(state: State) -> Result:
    """Lead an attempt at the next decree: an agent is missing or wants to join. This host's ranks have stopped."""
    decree = state.decree
    if decree is None or not state.is_voter:
        return state, ()
    own = (state.promised[0] + 1, state.name)
    state = replace(state, own=own, promises=frozenset(), offered=None, votes=frozenset())
    asked = [*decree.names, *sorted(state.joiners)]
    return _hear_own(
        state, [Message("ask", state.name, to, decree.epoch, own, decree=decree) for to in asked]
    )


def lose_patience(state: State) -> Result:
    """Leave out who has not answered by now. Nothing happens without a quorum."""
    decree = state.decree
    reports = {promise.report.voter.name: promise.report for promise in state.promises}
    if (
        decree is None
        or state.offered is not None
        or state.name not in reports
        or not state.suffices(reports)
    ):
        return state, ()
    newest = max(state.promises, key=lambda promise: promise.ballot)
    offered = newest.decree or next_decree(decree, list(reports.values()), state.needs)
    state = replace(state, offered=offered)
    offers = [
        Message("offer", state.name, to, decree.epoch, state.own, decree=offered) for to in decree.names
    ]
    return _hear_own(state, offers)


def repeat(state: State) -> tuple[Message, ...]:
    """Return the messages of its attempt that are unanswered, to send again: they or the answers may be lost."""
    if state.decree is None or state.own == NO_BALLOT or state.own < state.promised:
        return ()
    kind, decree = ("ask", state.decree) if state.offered is None else ("offer", state.offered)
    to = state.unanswered if state.offered is None else frozenset(state.decree.names) - state.votes
    return tuple(
        Message(kind, state.name, each, state.decree.epoch, state.own, decree=decree) for each in sorted(to)
    )


def forget(state: State, name: str) -> State:
    """Remove an agent that asked to join and is gone."""
    return replace(state, joiners=state.joiners - {name})


def bury(state: State, name: str) -> State:
    """Note that a voter has ended for good (rule 8)."""
    return replace(state, gone=state.gone | {name})


def ask_to_join(state: State, names: tuple[str, ...]) -> Result:
    """Ask voters to be let in; to be repeated until a decree names this agent."""
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


# ---- the decree that is offered


def next_decree(decree: Decree, reports: list[Report], needs: Quorum) -> Decree:
    """The decree of those that answered: who was in before keeps its order, and comes before who is new."""
    places = {name: place for place, name in enumerate(decree.names)}
    ranks = {candidate.member: place for place, candidate in enumerate(decree.members)}
    voters = sorted(
        (r.voter for r in reports), key=lambda voter: (places.get(voter.name, len(places)), voter.name)
    )
    savers = [voter.name for voter in voters if voter.can_save]
    voters = [voter for voter in voters if not voter.leaves] or voters
    voters = voters[: needs.most_hosts]
    kept = {voter.name for voter in voters}
    found = [each for report in reports if report.voter.name in kept for each in report.candidates]
    members = sorted(
        found, key=lambda one: (ranks.get(one.member, len(ranks)), one.step == NOT_STARTED, one.member)
    )
    is_first = decree.trained == NOT_STARTED
    num_hosts = len({one.member.host for one in members})
    enough = len(members) >= needs.ranks and (num_hosts >= needs.hosts or not is_first)
    if not enough or not (is_first or any(member.epoch == decree.trained for member in members)):
        members = []
    names = [voter.name for voter in voters]
    return Decree(
        decree.epoch + 1,
        tuple(members),
        tuple(voters),
        decree.tie_breaker if decree.tie_breaker in names else names[0],
        decree.epoch + 1 if members else decree.trained,
        "" if members or is_first else next(iter(savers), decree.saver),
    )


# ---- messages


def receive(state: State, message: Message) -> Result:
    """Hear a message. Loss, delay, repetition and any order are allowed."""
    if message.kind == "join":
        if state.decree is not None and message.sender in state.decree.names:  # it has not heard of it
            return state, (Message("decree", state.name, message.sender, decree=state.decree),)
        return (replace(state, joiners=state.joiners | {message.sender}) if state.is_voter else state), ()
    if message.kind in ("decree", "ask"):
        state = _learn(state, message.decree)
    if message.kind == "decree" or state.decree is None or message.epoch > state.decree.epoch:
        return state, ()
    if message.epoch < state.decree.epoch:
        return state, (Message("decree", state.name, message.sender, decree=state.decree),)
    return _HANDLERS[message.kind](state, message)


def _asked(state: State, message: Message) -> Result:
    if state.is_voter:
        if message.ballot < state.promised or message.ballot == state.accepted:
            return state, ()  # the same once more is answered: the first answer may have been lost
        state = replace(state, promised=message.ballot)
    promise = Promise(state.report, state.accepted, state.accepted_decree)
    return state, (Message("promise", state.name, message.sender, message.epoch, message.ballot, promise),)


def _promised(state: State, message: Message) -> Result:
    if message.ballot != state.own or state.offered is not None or message.promise is None:
        return state, ()
    state = replace(state, promises=state.promises | {message.promise})
    return (state, ()) if state.unanswered else lose_patience(state)


def _offered(state: State, message: Message) -> Result:
    if message.ballot < state.promised or not state.is_voter:
        return state, ()
    state = replace(state, promised=message.ballot, accepted=message.ballot, accepted_decree=message.decree)
    return state, (Message("vote", state.name, message.sender, message.epoch, message.ballot),)


def _voted(state: State, message: Message) -> Result:
    if message.ballot != state.own or state.offered is None or state.decree is None:
        return state, ()
    before, decree = state.decree, state.offered
    state = replace(state, votes=state.votes | {message.sender})
    if not state.suffices(state.votes):
        return state, ()
    told = sorted({*before.names, *decree.names} - {state.name})
    return _learn(state, decree), tuple(Message("decree", state.name, to, decree=decree) for to in told)


def _learn(state: State, decree: Decree | None) -> State:
    if decree is None or (state.decree is not None and decree.epoch <= state.decree.epoch):
        return state
    report = state.report
    if decree.members:
        report = replace(report, candidates=tuple(decree.updated(each) for each in report.candidates))
    return State(report, state.needs, decree, joiners=state.joiners - set(decree.names))


_HANDLERS = {"ask": _asked, "promise": _promised, "offer": _offered, "vote": _voted}
