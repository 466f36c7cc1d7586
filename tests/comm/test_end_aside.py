"""A group's destructor waits for its collectives, and after a lost rank one of these may never end."""

import threading
import weakref

from paceline.comm import opened_groups


class Group:
    """Stands for a process group."""


def test_whoever_lets_go_last_does_not_end_the_group():
    """A rank hung as it left `rebuild`: what held the old group last was a frame of its main thread."""
    ended_on = []
    group = Group()
    weakref.finalize(group, lambda: ended_on.append(threading.current_thread().name))
    opened_groups.end_aside(group)
    assert ended_on == []
    del group
    for thread in threading.enumerate():
        if thread.name == "paceline-close":
            thread.join(20.0)
    assert ended_on == ["paceline-close"]
