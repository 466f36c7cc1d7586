"""Agents of several hosts in told time: hosts die, freeze, are cut off and come back; there is one training."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.council_world import World
from paceline.launch.elastic.vote import Quorum


@pytest.fixture
def world() -> World:
    """Three hosts that train."""
    made = World(3, Quorum(hosts=3, ranks=1))
    made.run(4)
    assert made.training() == {0, 1, 2}
    return made


def kill(world: World, place: int) -> None:
    world.hosts[place].is_dead = True


def test_hosts_meet_and_begin_when_all_ranks_are_there(world: World) -> None:
    """Nobody trains before; then all do, by one plan, and all are voters."""
    plans = {host.plan for host in world.hosts}
    assert len(plans) == 1
    (plan,) = plans
    assert plan is not None
    decision = world.hosts[0].council.decision
    assert decision is not None
    assert len(plan.members) == len(decision.voters) == 3
    world.check()


def test_a_job_does_not_begin_without_a_host() -> None:
    """Of three hosts two come."""
    world = World(2, Quorum(hosts=3))
    world.run(10)
    assert not world.history
    assert {len(host.council.decision.voters) for host in world.hosts if host.council.decision} == {2}


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_dead_host_is_left_out_at_once(world: World, place: int) -> None:
    """Its kernel refuses connections, so nobody waits for silence."""
    kill(world, place)
    world.run(3)
    world.check()
    assert world.training() == {0, 1, 2} - {place}
    assert world.longest_stall_s() < 1.5


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_host_that_is_cut_off_is_left_out_after_silence_and_comes_back(world: World, place: int) -> None:
    """Nothing is refused, so silence decides; when the cable is in again, the host joins with new ranks."""
    world.cut.add(place)
    world.run(6)
    world.check()
    assert world.training() == {0, 1, 2} - {place}
    assert world.longest_stall_s() < 4
    others = [host for i, host in enumerate(world.hosts) if i != place]
    stops = [host.num_stops for host in others]
    world.cut.clear()
    world.run(5)
    world.check()
    assert world.training() == {0, 1, 2}
    assert [host.num_stops for host in others] == stops  # they paused


def test_who_comes_in_stops_nobody_within_a_step(world: World) -> None:
    """The others' ranks pause first, and ask: that is not urgent, and a host whose step takes longer completes it."""
    kill(world, 2)
    world.run(3)
    stops = [host.num_stops for host in world.hosts[:2]]
    world.hosts[1].step_s = 1.5  # longer than until somebody is asked again
    world.start(2)
    world.run(6)
    world.check()
    assert world.training() == {0, 1, 2}
    assert [host.num_stops for host in world.hosts[:2]] == stops


def test_a_host_whose_ranks_start_is_not_waited_for(world: World) -> None:
    """Started again, its agent is told of the job, and asks to join when its ranks are there."""
    kill(world, 2)
    world.run(3)
    epoch = world.hosts[0].epoch
    world.start(2)
    ranks, world.hosts[2].steps = world.hosts[2].steps, {}
    world.run(4)
    assert world.hosts[2].council.job == world.hosts[0].council.job
    assert world.hosts[0].epoch == epoch
    assert world.training() == {0, 1}
    world.hosts[2].steps = ranks
    world.run(4)
    world.check()
    assert world.training() == {0, 1, 2}
    assert world.hosts[0].epoch == epoch + 1


def test_a_short_cut_costs_nothing(world: World) -> None:
    """Nobody is suspected within a second and a half."""
    epoch = world.hosts[0].epoch
    world.cut.add(1)
    world.run(1.2)
    world.cut.clear()
    world.run(3)
    assert world.hosts[0].epoch == epoch
    assert world.training() == {0, 1, 2}


@pytest.mark.parametrize("place", [0, 1])
def test_a_frozen_agent_is_fenced_when_it_wakes(world: World, place: int) -> None:
    """It believes to be in its old epoch, is told otherwise, and its ranks come in as new ones."""
    world.hosts[place].is_frozen = True
    world.run(20)
    assert world.training() == {0, 1, 2} - {place}
    world.hosts[place].is_frozen = False
    world.run(5)
    world.check()
    assert world.training() == {0, 1, 2}


def test_a_frozen_agent_that_wakes_without_a_network_holds_no_vote(world: World) -> None:
    """It has heard nobody, and believes for a while that the others are there; `World.run` looks at each turn."""
    world.hosts[1].is_frozen = True
    world.cut.add(1)
    world.run(8)
    assert world.training() == {0, 2}
    world.hosts[1].is_frozen = False
    world.run(4)


@pytest.mark.parametrize(("frozen", "cut"), [(0, 1), (1, 1)])
@pytest.mark.parametrize("seconds", [0.5, 2.0])
def test_a_host_that_others_may_count_as_missing_holds_no_vote(
    world: World, frozen: int, cut: int, seconds: float
) -> None:
    """They count from what they heard of it, which may be earlier than what it heard of them. `World.run` looks."""
    world.hosts[frozen].is_frozen = True
    world.run(1.0)
    world.hosts[frozen].is_frozen = False
    world.run(0.5)
    world.cut.add(cut)
    world.run(seconds + 3)


def test_hosts_that_hear_each_other_hold_the_vote_all_the_time(world: World) -> None:
    """Else a host that is asked for a checkpoint would make none."""
    for _ in range(60):
        world.run(0.05)
        assert all(host.council.holds_vote(world.now_s) for host in world.hosts)


@pytest.mark.parametrize("late_s", [0.0, 0.06])
def test_a_host_that_comes_back_at_the_end_learns_that_the_job_is_over(world: World, late_s: float) -> None:
    """Done hosts had taken it in as a voter that waits for ranks to train with, and waited for it."""
    world.hosts[1].is_frozen = True
    world.run(6)
    for place in (0, 2):
        world.hosts[place].steps = {}
        world.hosts[place].council.leave()
        world.hosts[1].is_frozen = False
        world.run(late_s)
    world.run(4)
    assert world.hosts[1].council.is_all_over()
    world.hosts[1].is_dead = True
    world.run(3)
    assert all(world.hosts[place].council.all_done() for place in (0, 2))


def test_of_two_hosts_the_one_that_breaks_ties_goes_on() -> None:
    """Cut in two halves, one trains; the other waits, and joins again."""
    world = World(2, Quorum(hosts=2, ranks=1))
    world.run(4)
    world.cut.add(1)
    world.run(6)
    world.check()
    assert world.training() == {0}
    assert world.hosts[1].council.is_over(world.hosts[1].epoch)
    assert [host.council.holds_vote(world.now_s) for host in world.hosts] == [True, False]
    world.cut.clear()
    world.run(5)
    world.check()
    assert world.training() == {0, 1}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("after_s", [0.0, 0.5, 5.0])
def test_of_two_hosts_the_first_is_let_in_when_it_starts_again(after_s: float, ranks: int) -> None:
    """The other holds the state, and cannot decide alone: that the first has ended shows by who listens there."""
    world = World(2, Quorum(hosts=2, ranks=ranks))
    world.run(4)
    if after_s:
        kill(world, 0)
        world.run(after_s)
        assert world.training() <= {1}
    world.start(0)
    world.run(8)
    world.check()
    assert world.training() == {0, 1}
    kill(world, 0)  # and again
    world.run(1)
    world.start(0)
    world.run(8)
    world.check()
    assert world.training() == {0, 1}


def test_two_of_three_hosts_are_let_in_when_they_start_again(world: World) -> None:
    """One of them is not enough: the other may train."""
    kill(world, 0)
    kill(world, 2)
    world.run(3)
    world.start(2)
    world.run(6)
    assert world.training() == set()
    world.start(0)
    world.run(8)
    world.check()
    assert world.training() == {0, 1, 2}


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_host_that_was_out_of_touch_does_not_go_on_from_an_old_state(is_frozen: bool) -> None:
    """The first host has trained alone before it died: steps that the other has not seen."""
    world = World(2, Quorum(hosts=2, ranks=1))
    world.run(4)
    world.cut.add(1)
    world.hosts[1].is_frozen = is_frozen
    world.run(8)
    assert world.training() == {0}
    kill(world, 0)
    world.cut.clear()
    world.hosts[1].is_frozen = False
    world.run(0.1)
    world.start(0)
    world.run(8)
    world.check()
    assert world.training() == set()


def test_the_first_host_comes_back_as_a_new_one(world: World) -> None:
    """Host 0 is started again by the same command, which says that it begins a job: it joins the one that goes on."""
    kill(world, 0)
    world.run(3)
    world.start(0)
    world.run(5)
    world.check()
    assert world.training() == {0, 1, 2}
    assert world.hosts[0].council.job == world.hosts[1].council.job


def test_two_hosts_die_one_after_the_other(world: World) -> None:
    """Three voters become two, and the one that breaks ties goes on alone."""
    kill(world, 0)
    world.run(3)
    decision = world.hosts[1].council.decision
    assert decision is not None
    last = next(i for i in (1, 2) if world.hosts[i].council.own.name == decision.tie_breaker)
    kill(world, 3 - last)
    world.run(3)
    world.check()
    assert world.training() == {last}


def test_a_host_comes_back_although_the_first_is_gone(world: World) -> None:
    """It asks where nobody answers any more, and is invited by those that go on."""
    kill(world, 0)
    world.run(3)
    decision = world.hosts[1].council.decision
    assert decision is not None
    last = next(i for i in (1, 2) if world.hosts[i].council.own.name == decision.tie_breaker)
    kill(world, 3 - last)
    world.run(3)
    world.start(3 - last)
    world.run(6)
    world.check()
    assert world.training() == {1, 2}


def test_a_minority_waits(world: World) -> None:
    """Two of three die at once: nobody knows that they do not train elsewhere."""
    kill(world, 1)
    kill(world, 2)
    world.run(8)
    assert world.training() == set()
    assert len(world.hosts[0].council.missing()) == 2
    assert not world.hosts[0].council.holds_vote(world.now_s)  # it would overwrite a newer checkpoint


def test_fewer_than_the_least_number_of_ranks_wait() -> None:
    """The survivors keep their state, and go on once a third host is there again."""
    world = World(3, Quorum(hosts=3, ranks=3))
    world.run(4)
    kill(world, 2)
    world.run(4)
    assert world.training() == set()
    assert [host.council.holds_vote(world.now_s) for host in world.hosts[:2]] == [True, True]
    # If their processes were stopped until now: nothing is decided without host 0, which breaks ties.
    assert [host.council.holds_vote(world.now_s + 2.6) for host in world.hosts[:2]] == [True, False]
    world.start(2)
    world.run(5)
    world.check()
    assert world.training() == {0, 1, 2}


EVENTS: dict[str, Callable[[World, int], None]] = {
    "kill": kill,
    "cut": lambda world, place: world.cut.add(place),
    "heal": lambda world, _: world.cut.clear(),
    "freeze": lambda world, place: setattr(world.hosts[place], "is_frozen", True),
    "wake": lambda world, place: setattr(world.hosts[place], "is_frozen", False),
    "start": lambda world, place: world.start(place) if world.hosts[place].is_dead else None,
    "start again": lambda world, place: world.start(place),
}


@settings(deadline=None, max_examples=15)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(EVENTS)), st.integers(0, 2), st.floats(0.05, 4)), max_size=8)
)
def test_whatever_happens_steps_are_made_once(events: list[tuple[str, int, float]]) -> None:
    """Each step in one epoch, none twice; and if nobody was killed, all train in the end."""
    world = World(3, Quorum(hosts=3, ranks=1))
    world.run(4)
    for name, place, seconds in events:
        EVENTS[name](world, place)
        world.run(seconds)
    world.cut.clear()
    for host in world.hosts:
        host.is_frozen = False
    world.run(12)
    world.check()
    if not any(name in ("kill", "start again") for name, _, _ in events):
        assert world.training() == {0, 1, 2}
