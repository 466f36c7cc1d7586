"""What a rank notes when it trains again covers all since it trained last."""

import time

from paceline.elastic.agent_connection import RankAssignment
from paceline.elastic.history import ChangeRecorder


def seat(members, lost=(), num_new=0, why=""):
    """Of the rank whose processes are these letters."""
    return RankAssignment(1, 0, len(members), len(members), ("h", 1), lost, num_new, why, tuple(members))


def test_a_membership_that_broke_before_it_began_is_part_of_the_standstill():
    """Two of four die one after the other, the second while the others recover; then two come in."""
    still, began_s = ChangeRecorder((6, 6, 6, 6)), time.monotonic() - 5
    still.pass_through(seat("abcd", num_new=4))
    assert still.end(seat("abcd", num_new=4), (6, 6, 6, 6), 0) is None
    still.begin(began_s)
    still.pass_through(seat("acd", lost=(1,), why="b died"))
    still.begin(began_s + 4)
    still.pass_through(seat("cd", lost=(0,), why="a died"))
    change = still.end(seat("cd", lost=(0,), why="a died"), (12, 12), 3)
    assert (change.lost, change.num_new, change.samples_moved, change.step) == ((0, 1), 0, 12, 3)
    assert change.why == "b died; a died"
    assert 5 <= change.stalled_s < 9
    still.begin(time.monotonic())
    change = still.end(seat("cdef", num_new=2), (6, 6, 6, 6), 9)
    assert (change.lost, change.num_new, change.samples_moved) == ((), 2, 12)
    assert change.stalled_s < 1


def test_who_takes_the_place_of_one_that_is_lost_trains_its_samples():
    """They have moved once. Who comes in itself knows of the last membership what its agent says."""
    still, new = ChangeRecorder((12, 12)), ChangeRecorder((24,))
    still.end(seat("ab", num_new=2), (12, 12), 0)
    for each in (still, new):
        change = each.end(seat("ac", lost=(1,), num_new=1), (12, 12), 4)
        assert (change.lost, change.num_new, change.samples_moved) == ((1,), 1, 12)
