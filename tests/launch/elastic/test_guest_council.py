"""Councils of hosts that an engine starts: none is the first, some come late or elsewhere, some are told to go."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.council_world import World
from paceline.launch.elastic.plan import NOT_STARTED, Member
from paceline.launch.elastic.vote import NO_BALLOT, Quorum


def kill(world: World, place: int) -> None:
    """The agent of a host ends, with its ranks."""
    host = world.hosts[place]
    host.is_dead = True
    for other, each in enumerate(world.hosts):
        if not each.is_dead and not {place, other} & world.cut:
            each.council.closed(host.council.own.name, world.now_s)


def made(num_hosts: int, least: int, most: int = 8, ranks: int = 1, *, has_record: bool = True) -> World:
    needs = Quorum(ranks=ranks, most_hosts=most, begins_anew=True)
    return World(num_hosts, needs, least, has_record)


def test_hosts_of_which_none_is_the_first_begin_one_job() -> None:
    world = made(3, least=3)
    world.run(8)
    world.check()
    assert world.training() == {0, 1, 2}
    assert len({host.council.job for host in world.hosts}) == 1


@pytest.mark.parametrize("place", [0, 1])
def test_a_host_comes_back_at_another_address(place: int) -> None:
    """Host 0 is no exception."""
    world = made(3, least=3)
    world.run(8)
    kill(world, place)
    world.run(4)
    assert world.training() == {0, 1, 2} - {place}
    world.start(place)
    world.run(6)
    world.check()
    assert world.training() == {0, 1, 2}
    assert [host.num_stops for host in world.hosts if host is not world.hosts[place]] == [1, 1]


def test_training_begins_with_the_fewest_hosts_and_others_come() -> None:
    """One beyond the largest number waits, and comes in when another one has gone."""
    world = made(2, least=2, most=3)
    world.run(8)
    assert world.training() == {0, 1}
    world.start(2)
    world.run(6)
    assert world.training() == {0, 1, 2}
    world.start(3)
    world.run(6)
    assert world.training() == {0, 1, 2}
    assert [host.num_stops for host in world.hosts[:2]] == [0, 0]  # the others came in between two steps
    kill(world, 1)
    world.run(8)
    world.check()
    assert world.training() == {0, 2, 3}


def test_two_hosts_that_wait_for_one_place_stop_no_rank_twice() -> None:
    """One of them comes in. The other waits on, and no rank pauses for it again and again."""
    world = made(3, least=3, most=3)
    world.run(8)
    for place in (3, 4):
        world.start(place)
    world.run(6)
    kill(world, 1)
    world.run(8)
    world.check()
    assert world.training() == {0, 2, 3}
    assert world.history[-1][1] == 5  # one decision without host 1, and one with a host in its place
    waits = world.hosts[4]
    assert waits.council.may_leave(waits.epoch) is False  # no host counts on its vote


def test_a_host_that_asks_before_an_agent_has_seen_the_last_decision_stops_no_rank() -> None:
    """The agent's ranks do not train yet. It had asked for a vote, and then stopped them within their first step."""
    world = made(3, least=3)
    world.run(8)
    world.hosts[2].slow_s = 0.3
    world.start(3)
    world.run(0.35)
    world.start(4)
    world.run(5)
    world.check()
    assert world.training() == {0, 1, 2, 3, 4}
    assert [host.num_stops for host in world.hosts[:3]] == [0, 0, 0]


def test_a_rank_that_comes_during_a_vote_stops_no_rank() -> None:
    """Its host has told the others which ranks it brings. It is let in between two steps later."""
    world = made(3, least=3)
    world.run(8)
    world.hosts[1].step_s = 0.5  # the vote waits for it
    world.start(3)
    host = world.hosts[2]
    while host.council.state.promised == NO_BALLOT:
        world.run(0.05)
    assert world.training() == {0, 1, 2}
    host.members.append(Member(host.council.own.name, 7))
    host.steps[host.members[1]] = NOT_STARTED
    world.run(3)
    world.check()
    assert world.training() == {0, 1, 2, 3}
    assert [host.num_stops for host in world.hosts[:3]] == [0, 0, 0]


def test_of_two_halves_that_do_not_see_each_other_one_begins() -> None:
    """The record says which. The other one waits, and joins when the network is whole again."""
    world = made(4, least=2)
    world.cut = {2, 3}  # each of them alone
    world.run(12)
    assert world.training() == {0, 1}
    world.cut.clear()
    world.run(12)
    world.check()
    assert world.training() == {0, 1, 2, 3}


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_host_that_is_told_to_go_costs_no_step(place: int) -> None:
    world = made(3, least=3)
    world.run(8)
    world.hosts[place].is_told = True
    epoch, members = world.hosts[place].epoch, tuple(world.hosts[place].members)
    while world.hosts[place].council.may_leave(epoch) is None:
        world.run(0.05)
    assert world.hosts[place].council.may_leave(epoch) is False  # the others train on: no checkpoint
    plans = [host.plan for host in world.hosts if host is not world.hosts[place]]
    assert [plan and plan.left for plan in plans] == [members] * 2  # it is not lost
    kill(world, place)
    world.run(4)
    world.check()
    assert world.training() == {0, 1, 2} - {place}
    assert sum(host.num_stops for host in world.hosts) == 0


def test_if_all_hosts_are_told_one_makes_a_checkpoint() -> None:
    world = made(3, least=3)
    world.run(8)
    epoch = world.hosts[0].epoch
    for host in world.hosts:
        host.is_told = True
    world.run(4)
    assert sorted(host.council.may_leave(epoch) for host in world.hosts) == [False, False, True]  # type: ignore[type-var]


def test_if_too_few_ranks_stay_one_that_goes_makes_a_checkpoint() -> None:
    world = made(3, least=3, ranks=2)
    world.run(8)
    epoch = world.hosts[0].epoch
    for place in (1, 2):
        world.hosts[place].is_told = True
    world.run(4)
    assert sorted(world.hosts[place].council.may_leave(epoch) for place in (1, 2)) == [False, True]  # type: ignore[type-var]


def lose_ranks(world: World, *places: int) -> None:
    """All ranks of these hosts die."""
    for place in places:
        host = world.hosts[place]
        host.members, host.steps, host.stops_s, host.has_paused = [], {}, world.now_s, False


def start_ranks(world: World, *places: int) -> None:
    """The engine of these hosts has started a rank again."""
    for place in places:
        host = world.hosts[place]
        host.members = [Member(host.council.own.name, 9)]
        host.steps = {host.members[0]: NOT_STARTED}


def test_if_all_ranks_of_all_hosts_are_lost_new_ones_begin_anew() -> None:
    """Each agent has said that it has none of the old ranks. They had waited for their patience to end."""
    world = made(3, least=3)
    world.run(8)
    lose_ranks(world, 0, 1, 2)
    lost = world.history[-1][1]
    world.run(0.5)
    world.history.clear()
    start_ranks(world, 0, 1, 2)
    world.run(2)
    world.check()
    assert world.training() == {0, 1, 2}
    assert world.history[0][1] > lost
    assert world.history[0][2] == 1


def _nothing_is_decided_after_a_loss(world: World) -> None:
    """All ranks of the first two hosts die, and others come."""
    lose_ranks(world, 0, 1)
    world.run(0.5)
    start_ranks(world, 0, 1)
    before = len(world.history)
    world.run(20)
    assert len(world.history) == before


def test_new_ranks_do_not_begin_anew_while_a_host_may_have_the_state() -> None:
    """It is out of touch. When it is back, training goes on from there."""
    world = made(3, least=3)
    world.run(8)
    world.cut.add(2)
    _nothing_is_decided_after_a_loss(world)
    world.cut.clear()
    world.run(8)
    world.check()
    assert world.training() == {0, 1, 2}


def test_new_ranks_do_not_begin_anew_when_others_have_ended_well() -> None:
    world = made(3, least=3)
    world.run(8)
    world.hosts[2].council.leave()
    world.hosts[2].steps = {}
    _nothing_is_decided_after_a_loss(world)


def test_new_ranks_do_not_begin_anew_from_what_is_older_than_a_checkpoint() -> None:
    """A rank that left has made it. Those that wait have loaded an older one before."""
    world = made(3, least=3, ranks=2)
    world.run(8)
    for place in (1, 2):
        world.hosts[place].is_told = True
    world.run(3)
    lose_ranks(world, 0)
    world.run(0.5)
    world.start(3)
    start_ranks(world, 0)
    before = len(world.history)
    world.run(20)
    assert len(world.history) == before


EVENTS: dict[str, Callable[[World, int], None]] = {
    "kill": kill,
    "cut": lambda world, place: world.cut.add(place),
    "heal": lambda world, _: world.cut.clear(),
    "freeze": lambda world, place: setattr(world.hosts[place], "is_frozen", True),
    "wake": lambda world, place: setattr(world.hosts[place], "is_frozen", False),
    "start": lambda world, place: world.start(place) if world.hosts[place].is_dead else None,
    "told": lambda world, place: setattr(world.hosts[place], "is_told", True),
}


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(EVENTS)), st.integers(0, 2), st.floats(0.05, 4)), max_size=8),
    st.floats(0.0, 8.0),
)
def test_whatever_happens_steps_are_made_once(events: list[tuple[str, int, float]], begins_s: float) -> None:
    """Also if it happens before training has begun: each step in one epoch, none twice, in one job."""
    world = made(3, least=2)
    world.run(begins_s)
    for name, place, seconds in events:
        EVENTS[name](world, place)
        world.run(seconds)
    world.cut.clear()
    for host in world.hosts:
        host.is_frozen = False
    world.run(15)
    if world.history:
        world.check()
