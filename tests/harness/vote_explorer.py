"""Explores every order of events of a few agents that vote, breadth first.

Messages are never taken out of the network: any may be delivered now, later, again or never. That covers loss, delay,
reordering, repetition, partition and crash. A crashed host gets no more messages. Only the number of suspicions is
bounded.

A host may also end for good, if it has decided nothing that the others do not know. Those are told (rule 8 of
`vote.py`). What it has sent may still arrive.

Every combination is checked. An epoch has one decision. No host trains by a decision while a later one with members is
decided. From every n-th combination the network heals, with every set of hosts dead that leaves a quorum of each
decision that may still be decided. Then the other hosts have to come to a decision of live hosts that train.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from paceline.launch.elastic import vote
from paceline.launch.elastic.decision import AgentInfo, Candidate, Decision
from paceline.launch.elastic.plan import NOT_STARTED, Member
from paceline.launch.elastic.vote import Message, Quorum, Report, State

_SUSPECT, _LOSE_PATIENCE = -1, -2
_MOST_TURNS = 25

# the hosts' states, the network as a set of bits, suspicions and ends left
Node = tuple[tuple[int, ...], int, tuple[int, int]]


@dataclass(frozen=True)
class Scene:
    """The start of an exploration: a decision of hosts that train.

    Attributes:
        steps: The number of steps that each host's rank has completed. `NOT_STARTED` is a new rank that is not in the
            decision, None a host without a rank.
        joiners: Number of other hosts, which ask to join.
        suspicions: How often a host leads an attempt.
        ends: How many hosts may end for good.
        begins_anew: Whether new ranks may begin anew.
    """

    steps: tuple[int | None, ...]
    joiners: int = 0
    suspicions: int = 2
    ends: int = 0
    begins_anew: bool = False

    def states(self) -> tuple[State, ...]:
        reports = [
            reported(f"h{i}", NOT_STARTED if step == NOT_STARTED else 0, step)
            for i, step in enumerate(self.steps)
        ]
        members = tuple(one for report in reports for one in report.candidates if one.step != NOT_STARTED)
        voters = tuple(report.agent for report in reports)
        decision = Decision(0, members, voters, "h0", trained=0)
        new = [reported(f"h{len(reports) + i}", NOT_STARTED, NOT_STARTED) for i in range(self.joiners)]
        needs = Quorum(begins_anew=self.begins_anew)
        return *(State(report, needs, decision) for report in reports), *(State(report) for report in new)


@dataclass(frozen=True)
class Ended(State):
    """A host that has ended for good: nothing happens there any more."""

    known: int = NOT_STARTED  # the epoch of the newest decision that it knew


def reported(name: str, epoch: int, step: int | None) -> Report:
    """Return the report of a host with one rank, or with none."""
    return Report(AgentInfo(name), () if step is None else (Candidate(Member(name, 0), epoch, step),))


@dataclass
class Found:
    """The results of an exploration."""

    combinations: int = 0
    is_complete: bool = False
    highest_epoch: int = 0
    healed_from: int = 0


class _Table:
    """A table that numbers states and messages, so that a million combinations fit into memory."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number(self, item: Any) -> int:
        found = self._numbers.get(item)
        if found is None:
            found = self._numbers[item] = len(self.items)
            self.items.append(item)
        return found


class Explorer:
    """The exploration of all events that can happen in a scene."""

    def __init__(self, scene: Scene) -> None:
        self._states, self._messages = _Table(), _Table()
        states = scene.states()
        self._hosts = {state.name: i for i, state in enumerate(states)}
        self._mail = [0] * len(states)  # the messages to each host
        self._dull: defaultdict[int, int] = defaultdict(int)  # the messages that do nothing in a state
        self._known_trained: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._after: dict[tuple[int, int], tuple[int, int]] = {}  # (state, event) -> (state, messages)
        voters = tuple(f"h{i}" for i in range(len(scene.steps)))
        wishes = [m for state in states[len(voters) :] for m in vote.ask_to_join(state, voters)[1]]
        numbers = tuple(self._states.number(state) for state in states)
        self._ended: set[int] = set()  # numbers of states
        self._start: Node = numbers, self._mask(wishes), (scene.suspicions, scene.ends)
        self.found = Found()

    def _mask(self, messages: Any) -> int:
        mask = 0
        for message in messages:
            number = self._messages.number(message)
            mask |= 1 << number
            self._mail[self._hosts[message.to]] |= 1 << number
        return mask

    def _apply(self, number: int, event: int) -> tuple[int, int]:
        state = self._states.items[number]
        if event == _SUSPECT:
            after, out = vote.suspect(state)
        elif event == _LOSE_PATIENCE:
            after, out = vote.lose_patience(state)
        else:
            after, out = vote.receive(state, self._messages.items[event])
        found = self._after[number, event] = self._states.number(after), self._mask(out)
        if event >= 0 and found == (number, 0):
            self._dull[number] |= 1 << event
        return found

    def _successors(self, node: Node) -> Iterator[Node]:
        numbers, network, left = node
        known = self._after
        for i, number in enumerate(numbers):
            for event in (_SUSPECT, _LOSE_PATIENCE) if left[0] else (_LOSE_PATIENCE,):
                after, sent = known.get((number, event)) or self._apply(number, event)
                if after != number or sent & ~network:
                    less = (left[0] - (event == _SUSPECT), left[1])
                    yield (*numbers[:i], after, *numbers[i + 1 :]), network | sent, less
        if left[1]:
            for i, number in enumerate(numbers):
                if number not in self._ended:
                    yield self._after_end(numbers, i), network, (left[0], left[1] - 1)
        for i, number in enumerate(numbers):
            if number in self._ended:
                continue
            rest = network & self._mail[i] & ~self._dull[number]
            while rest:
                low = rest & -rest
                rest ^= low
                event = low.bit_length() - 1
                after, sent = known.get((number, event)) or self._apply(number, event)
                if after != number or sent & ~network:
                    yield (*numbers[:i], after, *numbers[i + 1 :]), network | sent, left
        trained = self._known_trained.get(numbers)
        if trained is None:
            self._check(numbers)
            trained = self._known_trained[numbers] = self._trained(numbers)
        if trained != numbers:
            yield trained, network, left

    def _after_end(self, numbers: tuple[int, ...], place: int) -> tuple[int, ...]:
        """Let a host end for good, and tell all others that know what it had decided."""
        state = self._states.items[numbers[place]]
        ended = Ended(
            Report(AgentInfo(state.name)), known=state.decision.epoch if state.decision else NOT_STARTED
        )
        self._ended.add(self._states.number(ended))
        after = [_told(self._states.items[each], ended) for each in numbers]
        after[place] = ended
        return tuple(self._states.number(each) for each in after)

    def _trained(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Let all members of a decision train. A member with older state takes the holder's."""
        for number in numbers:
            decision = self._states.items[number].decision
            if decision is None or not decision.members:
                continue
            hosts = {self._hosts[member.member.host] for member in decision.members}
            states = [self._states.items[numbers[host]] for host in hosts]
            if all(state.trains and state.decision == decision for state in states):
                return tuple(
                    self._states.number(_caught_up(self._states.items[each], decision))
                    if i in hosts
                    else each
                    for i, each in enumerate(numbers)
                )
        return numbers

    def _check(self, numbers: tuple[int, ...]) -> None:
        states = [self._states.items[number] for number in numbers]
        decisions: dict[int, Decision] = {}
        for state in states:
            if (decision := state.decision) is not None and decisions.setdefault(
                decision.epoch, decision
            ) != decision:
                raise AssertionError(
                    f"two decisions of one epoch: {decision} and {decisions[decision.epoch]}"
                )
        with_members = [decision for decision in decisions.values() if decision.members]
        for decision in with_members:
            hosts = {self._hosts[member.member.host] for member in decision.members}
            trains = all(states[host].trains and states[host].decision == decision for host in hosts)
            if trains and (later := [each for each in with_members if each.epoch > decision.epoch]):
                raise AssertionError(f"two trainings: {decision} and {later}")
        self.found.highest_epoch = max(self.found.highest_epoch, *decisions)

    def _check_progress(self, node: Node, prefer: int) -> None:
        """Check that the others go on if any hosts die, as long as they are a majority of all that may be decided."""
        states = [self._states.items[number] for number in node[0]]
        network = [self._messages.items[i] for i in range(node[1].bit_length()) if node[1] >> i & 1]
        newest = _newest(states)
        may_be = {newest, *(each for s in states for each in (s.accepted_decision, s.offered) if each)}
        may_be |= {m.decision for m in network if m.decision is not None and m.decision.epoch > newest.epoch}
        answered = {
            m.promise.report.agent for m in network if m.promise is not None and m.epoch == newest.epoch
        }
        may_be.add(replace(newest, voters=(*newest.voters, *sorted(answered - {*newest.voters}, key=str))))
        ended = [state for state in states if isinstance(state, Ended)]
        everybody = frozenset(i for i, state in enumerate(states) if not isinstance(state, Ended))
        for size in range(len(everybody)):
            for dead in map(frozenset, itertools.combinations(everybody, size)):
                live = everybody - dead
                names = [states[i].name for i in live]
                suffice = all(
                    each.has_quorum(names) or _are_all_that_live(each, names, ended) for each in may_be
                )
                if suffice and any(states[i].decision == newest for i in live):
                    self.found.healed_from += 1
                    if not heals(list(states), network, dead, prefer):
                        raise AssertionError(f"stuck with {set(dead)} dead: {states} {network}")

    def choices(self) -> list[Node]:
        """Return the possible next nodes after `go`."""
        return sorted(self._successors(self._start))

    def go(self, node: Node) -> None:
        """Go to one of `choices`."""
        self._start = node

    def check_healing(self, prefer: int) -> None:
        """Check that the network heals from the node that `go` has led to."""
        self._check(self._start[0])
        self._check_progress(self._start, prefer)

    def run(self, limit: int = 10_000_000, every: int = 97) -> Found:
        """Go through all combinations, or the first `limit`.

        Raises:
            AssertionError: Two decisions of an epoch, two trainings, or stuck.
        """
        seen, front, popped = {self._start}, deque([self._start]), 0
        while front and len(seen) <= limit:
            node = front.popleft()
            if popped % every == 0:
                self._check_progress(node, popped // every)
            popped += 1
            for after in self._successors(node):
                if after not in seen:
                    seen.add(after)
                    front.append(after)
        self.found.combinations, self.found.is_complete = len(seen), not front
        return self.found


def _are_all_that_live(decision: Decision, names: list[str], ended: list[Ended]) -> bool:
    """Return whether these are all voters but those that are known to have ended for good."""
    gone = {each.name for each in ended if each.known <= decision.epoch}
    return bool({*names} & {*decision.names}) and {*decision.names} <= {*names} | gone


def _told(state: State, ended: Ended) -> State:
    """Return the state of a host that is told that another has ended for good."""
    mine = state.decision
    if mine is None or ended.name not in mine.names or ended.known > mine.epoch:
        return state
    return vote.bury(state, ended.name)


def _caught_up(state: State, decision: Decision) -> State:
    mine = {member.member for member in decision.members}
    candidates = tuple(
        Candidate(each.member, decision.epoch, max(decision.holder.step, 0)) if each.member in mine else each
        for each in state.report.candidates
    )
    return replace(state, report=replace(state.report, candidates=candidates))


def _newest(states: list[State]) -> Decision:
    return max((state.decision for state in states if state.decision), key=lambda decision: decision.epoch)


def heals(states: list[State], network: list[Message], dead: frozenset[int], prefer: int) -> bool:
    """Return whether live hosts come to a decision of live hosts by which all train; with members if their state lives.

    From now on no message is lost. A host without the newest decision is told it, and a host that is not in it asks to
    join. Time-outs come to one host at a time, as random delays make them.
    """
    places = {state.name: i for i, state in enumerate(states)}
    ended = [state for state in states if isinstance(state, Ended)]
    dead = dead | {places[state.name] for state in ended}
    live = [i for i in range(len(states)) if i not in dead]

    def deliver(messages: Iterable[Message]) -> None:
        queue = deque(messages)
        while queue:
            message = queue.popleft()
            if (i := places[message.to]) not in dead:
                states[i], out = vote.receive(states[i], message)
                queue.extend(out)

    deliver(network)
    for _ in range(_MOST_TURNS):
        newest = _newest([states[i] for i in live])
        for i in live:
            for each in ended:
                states[i] = _told(states[i], each)
            deliver([Message("decision", states[i].name, states[i].name, decision=newest)])
            if not states[i].is_voter:
                deliver(vote.ask_to_join(states[i], newest.names)[1])
        newest = _newest([states[i] for i in live])
        hosts = [places[name] for name in newest.names]
        lives = any(c.epoch == newest.trained for i in live for c in states[i].report.candidates)
        all_train = all(states[i].decision == newest and states[i].trains for i in hosts)
        if all_train and not set(hosts) & dead and (newest.members or not lives):
            return True
        for i in sorted(live, key=lambda i: (i - prefer) % len(states)):
            before = states[i]
            if before.is_voter:
                states[i], out = vote.lose_patience(before)
                if not out and states[i] == before:
                    states[i], out = vote.suspect(before)
                deliver(out)
                if out or states[i] != before:
                    break
    return False
