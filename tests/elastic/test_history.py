"""What a rank notes when it trains again covers all since it trained last."""

import time

from paceline.elastic.agent_connection import RankAssignment
from paceline.elastic.client import ChangeRecorder


def assignment(members, lost=(), num_new=0, why="", left=()):
    """Of the rank whose processes are these letters."""
    size, names = len(members), tuple(members)
    return RankAssignment(1, 0, size, size, ("h", 1), lost, num_new, why, names, left=left)


def test_a_membership_that_broke_before_it_began_is_part_of_the_standstill():
    """Two of four die one after the other, the second while the others recover; then two come in."""
    still, began_s = ChangeRecorder((6, 6, 6, 6)), time.monotonic() - 5
    still.pass_through(assignment("abcd", num_new=4))
    assert still.end(assignment("abcd", num_new=4), (6, 6, 6, 6), 0) is None
    still.begin(began_s)
    still.pass_through(assignment("acd", lost=(1,), why="b died"))
    still.begin(began_s + 4)
    still.pass_through(assignment("cd", lost=(0,), why="a died"))
    change = still.end(assignment("cd", lost=(0,), why="a died"), (12, 12), 3)
    assert (change.lost, change.num_new, change.samples_moved, change.step) == ((0, 1), 0, 12, 3)
    assert change.why == "b died; a died"
    assert 5 <= change.stalled_s < 9
    still.begin(time.monotonic())
    change = still.end(assignment("cdef", num_new=2), (6, 6, 6, 6), 9)
    assert (change.lost, change.num_new, change.samples_moved) == ((), 2, 12)
    assert change.stalled_s < 1


def test_who_takes_the_place_of_one_that_is_lost_trains_its_samples():
    """They have moved once. Who comes in itself knows of the last membership what its agent says."""
    still, new = ChangeRecorder((12, 12)), ChangeRecorder((24,))
    still.end(assignment("ab", num_new=2), (12, 12), 0)
    for each in (still, new):
        change = each.end(assignment("ac", lost=(1,), num_new=1), (12, 12), 4)
        assert (change.lost, change.num_new, change.samples_moved) == ((1,), 1, 12)


def test_a_rank_that_was_told_to_end_has_left_and_is_not_lost():
    """One of four leaves, and before the others go on another one dies. What has left is forgotten then."""
    still = ChangeRecorder((6, 6, 6, 6))
    still.end(assignment("abcd", num_new=4), (6, 6, 6, 6), 0)
    still.pass_through(assignment("abd", left=("c",), why="c was told to end"))
    still.pass_through(assignment("bd", lost=(0,), why="a died"))
    change = still.end(assignment("bd", lost=(0,), why="a died"), (12, 12), 3)
    assert (change.lost, change.left, change.samples_moved) == ((0,), (2,), 12)
    still.pass_through(assignment("b", lost=(1,)))
    change = still.end(assignment("b", lost=(1,)), (24,), 5)
    assert (change.lost, change.left) == ((1,), ())
