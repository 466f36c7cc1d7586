"""The vote on who trains on: all orders of events of few hosts, random ones of more, and rules broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.vote_explorer import Explorer, Scene, heals, reported
from paceline.launch.elastic import vote
from paceline.launch.elastic.decision import AgentInfo, Candidate, Decision
from paceline.launch.elastic.plan import NOT_STARTED, Address, Member
from paceline.launch.elastic.vote import NO_BALLOT, Message, Promise, Quorum, Report, Result, State

SCENES = {
    "two hosts": Scene(steps=(4, 4), suspicions=3),
    "two hosts, one a step ahead": Scene(steps=(4, 5), suspicions=3),
    "two hosts and a third that joins": Scene(steps=(4, 4), joiners=1),
    "one host and two that join": Scene(steps=(4,), joiners=2),
    "ranks on one of three hosts": Scene(steps=(None, NOT_STARTED, 4), suspicions=1),
    "two hosts, of which one ends for good": Scene(steps=(4, 4), suspicions=3, ends=1),
    "two of three hosts end for good": Scene(steps=(4, 4, 4), suspicions=1, ends=2),
    "two ranks of three are new": Scene(steps=(NOT_STARTED, NOT_STARTED, 4), suspicions=1),
    "new ranks may begin anew": Scene((NOT_STARTED, NOT_STARTED, 4), suspicions=1, begins_anew=True),
    "new ranks of two hosts may begin anew": Scene((NOT_STARTED, 4), suspicions=3, begins_anew=True),
}


@pytest.mark.parametrize("name", SCENES)
def test_no_order_of_events_makes_two_trainings(name: str) -> None:
    """Whatever is lost, late, repeated or dead: one decision an epoch, one training; what can heal does."""
    found = Explorer(SCENES[name]).run(every=47)
    assert found.is_complete
    assert found.highest_epoch == SCENES[name].suspicions
    assert found.healed_from > 40


@pytest.mark.slow
def test_no_order_of_events_of_three_hosts_makes_two_trainings() -> None:
    """The same for three hosts, of which two suspect others, in any order."""
    found = Explorer(Scene(steps=(4, 4, 4))).run()
    assert found.is_complete
    assert found.combinations > 100_000


@pytest.mark.lab
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "scene",
    [
        Scene(steps=(4, 4, 4), suspicions=3),
        Scene(steps=(4, 4, 4), joiners=1),
        Scene(steps=(4, 5, None)),
        Scene(steps=(4, 4), joiners=1, ends=1),
        Scene(steps=(4, 4, 4), ends=2),
    ],
    ids=str,
)
def test_many_orders_of_events_of_three_hosts_make_one_training(scene: Scene) -> None:
    """Larger ones, as far as the memory goes."""
    found = Explorer(scene).run(limit=3_000_000 if not scene.ends else 400_000, every=499)
    assert found.combinations > 100_000


# ---- broken rules


def _half_is_enough(self: Decision, names: object) -> bool:
    return 2 * len(set(names) & set(self.names)) >= len(self.voters)  # type: ignore[call-overload]


def _forgets_what_it_accepted(state: State, message: Message) -> Result:
    after, out = vote._asked(state, message)
    return after, tuple(replace(each, promise=Promise(state.report, NO_BALLOT, None)) for each in out)


def _promises_below(state: State, message: Message) -> Result:
    return vote._asked(replace(state, promised=NO_BALLOT), message)


def _accepts_below_its_promise(state: State, message: Message) -> Result:
    after, out = vote._offered(replace(state, promised=NO_BALLOT), message)
    return replace(after, promised=max(message.ballot, state.promised)), out


def _old_epochs_vote(state: State, message: Message) -> Result:
    known = state.decision
    if known is not None and message.kind not in ("decision", "join", "ask"):
        message = replace(message, epoch=known.epoch)
    return _RECEIVE(state, message)


def _begins_anew(decision: Decision, reports: list[Report], *given: object) -> Decision:
    return _NEXT_DECISION(replace(decision, trained=-1), reports, *given)  # type: ignore[arg-type]


def _begins_anew_without_asking(decision: Decision, reports: list[Report], *given: object) -> Decision:
    return _NEXT_DECISION(replace(decision, members=(), keepers=()), reports, *given)  # type: ignore[arg-type]


def _a_wish_makes_a_voter(decision: Decision, reports: list[Report], *given: object) -> Decision:
    found = _NEXT_DECISION(decision, reports, *given)  # type: ignore[arg-type]
    return replace(found, voters=(*found.voters, *(v for v in [AgentInfo("h2")] if "h2" not in found.names)))


def _one_is_gone(self: State, names: object) -> bool:
    return self.decision is not None and (self.decision.has_quorum(names) or bool(self.gone))  # type: ignore[arg-type]


def _promises_while_training(state: State) -> bool:
    return state.is_voter


_RECEIVE, _NEXT_DECISION = vote.receive, vote.next_decision


@dataclass(frozen=True)
class Mutant:
    """A rule that is broken: what takes which name's place, where an exploration finds it, and what it says."""

    owner: object
    name: str
    value: Callable[..., object] | property
    scene: Scene
    finding: str


MUTANTS = {
    "half is enough": Mutant(Decision, "has_quorum", _half_is_enough, Scene((4, 4)), "two"),
    "forgets what it accepted": Mutant(
        vote._HANDLERS, "ask", _forgets_what_it_accepted, Scene((4, 4, 4)), "two decisions"
    ),
    "promises below": Mutant(vote._HANDLERS, "ask", _promises_below, Scene((4, 4, 4)), "two decisions"),
    "accepts below its promise": Mutant(
        vote._HANDLERS, "offer", _accepts_below_its_promise, Scene((4, 4, 4)), "two decisions"
    ),
    "old epochs vote": Mutant(vote, "receive", _old_epochs_vote, Scene((4, 4, 4)), "two decisions"),
    "begins anew": Mutant(
        vote, "next_decision", _begins_anew, Scene((NOT_STARTED, NOT_STARTED, 4)), "two trainings"
    ),
    "begins anew without asking": Mutant(
        vote,
        "next_decision",
        _begins_anew_without_asking,
        Scene((NOT_STARTED, NOT_STARTED, 4), begins_anew=True),
        "two trainings",
    ),
    "a wish makes a voter": Mutant(
        vote, "next_decision", _a_wish_makes_a_voter, Scene((4, 4), joiners=1), "stuck"
    ),
    "one is gone, so another is not waited for": Mutant(
        State, "suffices", _one_is_gone, Scene((4, 4, 4), ends=1), "two decisions"
    ),
    "a promise does not stop ranks": Mutant(
        State, "trains", property(_promises_while_training), Scene((None, 4, 4)), "two trainings"
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exploration can fail: it finds each rule that is broken on purpose."""
    mutant = MUTANTS[name]
    if isinstance(mutant.owner, dict):
        monkeypatch.setitem(mutant.owner, mutant.name, mutant.value)
    else:
        monkeypatch.setattr(mutant.owner, mutant.name, mutant.value)
    with pytest.raises(AssertionError, match=f"^{mutant.finding}"):
        Explorer(mutant.scene).run(limit=400_000, every=7 if mutant.finding == "stuck" else 10**9)


# ---- more hosts, at random


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_random_events_of_more_hosts_make_one_training(data: st.DataObject) -> None:
    """Four or five hosts and one that joins; a wall of failures, then everything heals that keeps a quorum."""
    steps = tuple(data.draw(st.lists(st.sampled_from([None, 4, 5]), min_size=4, max_size=5)))
    explorer = Explorer(Scene(steps, joiners=1, suspicions=4))
    for _ in range(data.draw(st.integers(0, 40))):
        choices = explorer.choices()
        if not choices:
            break
        explorer.go(choices[data.draw(st.integers(0, len(choices) - 1))])
    explorer.check_healing(data.draw(st.integers(0, 5)))


# ---- one by one


def test_a_lone_agent_decides_at_once() -> None:
    """One host needs no other host: an attempt is a decision."""
    report = Report(
        AgentInfo("a", store=Address("127.0.0.1", 9)), (Candidate(Member("a", 0)), Candidate(Member("a", 1)))
    )
    state, out = vote.suspect(vote.begin(report, Quorum()))
    assert not out
    assert state.decision is not None
    plan = state.decision.plan()
    assert plan is not None
    assert (plan.epoch, plan.members, plan.step) == (1, (Member("a", 0), Member("a", 1)), 0)
    assert plan.store == Address("127.0.0.1", 9)


def test_nobody_trains_while_ranks_are_too_few() -> None:
    """The first members wait for all hosts, later ones for the least number of ranks; until then there is no plan."""
    state = vote.begin(Report(AgentInfo("a"), (Candidate(Member("a", 0)),)), Quorum(hosts=2, ranks=1))
    state, _ = vote.suspect(state)
    assert state.decision is not None
    assert state.decision.plan() is None
    assert state.trains


def test_who_was_in_keeps_its_order_and_the_furthest_holds_the_state() -> None:
    """Survivors first, by their old ranks; a rank that is new comes last and is behind."""
    old = [Candidate(Member("b", 0), 3, 7), Candidate(Member("a", 0), 3, 8)]
    decision = Decision(3, tuple(old), (AgentInfo("a"), AgentInfo("b")), "b", trained=3)
    reports = [Report(AgentInfo("a"), (Candidate(Member("a", 1)), old[1])), Report(AgentInfo("b"), (old[0],))]
    after = vote.next_decision(decision, reports, Quorum())
    assert [one.member for one in after.members] == [Member("b", 0), Member("a", 0), Member("a", 1)]
    assert (after.tie_breaker, after.holder) == ("b", old[1])
    assert [after.updated(one).epoch for one in after.members] == [3, 4, -1]
    empty = replace(decision, epoch=4, members=())  # ranks were too few
    assert [one.member for one in vote.next_decision(empty, reports, Quorum()).members] == [
        Member("a", 0),
        Member("b", 0),
        Member("a", 1),
    ]


def test_a_host_that_waits_takes_the_place_of_one_without_ranks() -> None:
    """Its agent lives on for a while, and had kept its place: the others paused for the waiting host, in vain."""
    old = Candidate(Member("b", 0), 3, 7)
    decision = Decision(3, (old,), (AgentInfo("a"), AgentInfo("b")), "a", trained=3)
    reports = [
        Report(AgentInfo("a")),
        Report(AgentInfo("b"), (old,)),
        reported("c", NOT_STARTED, NOT_STARTED),
    ]
    after = vote.next_decision(decision, reports, Quorum(most_hosts=2))
    assert (after.names, after.tie_breaker) == (("b", "c"), "b")
    assert [one.member.host for one in after.members] == ["b", "c"]


def test_a_host_without_a_place_is_told_so() -> None:
    """It is not asked in the next attempt, so no rank pauses for it."""
    old = Candidate(Member("a", 0), 3, 7)
    state = State(Report(AgentInfo("a"), (old,)), Quorum(most_hosts=1))
    state = replace(state, decision=Decision(3, (old,), (AgentInfo("a"),), "a", trained=3))
    after, out = vote.receive(state, Message("join", "b", "a"))
    assert (after, [message.kind for message in out]) == (state, ["decision"])


def test_an_old_message_is_answered_by_the_newest_decision() -> None:
    """Fencing: who wakes up after others went on is told so, and nothing else."""
    decision = Decision(5, (), (AgentInfo("a"),), "a")
    state = State(Report(AgentInfo("a")), decision=decision)
    for kind in ("ask", "promise", "offer", "vote"):
        after, out = vote.receive(state, Message(kind, "b", "a", epoch=4, ballot=(9, "b")))
        assert after == state
        assert out == (Message("decision", "a", "b", decision=decision),)


def test_reports_are_of_the_hosts_own_ranks() -> None:
    """The explorer's scenes say what they mean."""
    assert reported("h1", 0, 4).candidates == (Candidate(Member("h1", 0), 0, 4),)
    assert heals(list(Scene((4, 4)).states()), [], frozenset(), 0)


def test_a_host_of_the_last_membership_makes_the_checkpoint() -> None:
    """Ranks of another had left before, so it could make none, but its agent had not taken its word back."""
    decision = Decision(
        4, (Candidate(Member("b", 0), 3, 7),), (AgentInfo("a"), AgentInfo("b")), "a", trained=4
    )
    reports = [Report(AgentInfo("a", can_save=True)), Report(AgentInfo("b", can_save=True))]
    after = vote.next_decision(decision, reports, Quorum())
    assert (after.members, after.saver) == ((), "b")
    assert vote.next_decision(after, reports[:1], Quorum()).saver == "b"
