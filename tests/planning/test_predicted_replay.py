"""Replayed steps, by hand; and lines through two measured messages."""

import math

import pytest

from paceline.errors import ConfigurationError
from paceline.planning import AlphaBetaCost
from paceline.planning.replay import Wire, replay


def replayed(ready_s, wire_s, computed_s, launch_s=0.0, finish_s=0.0):
    number = len(ready_s)
    wires = [Wire(0.0, wire_s, wire_s)] * number
    done = replay(ready_s, wires, computed_s, [launch_s] * number, [finish_s] * number)
    return pytest.approx((done.end_s, done.exposed_s))


def test_one_wire_behind_backward():
    """0.4 to 1.0, then 1.0 to 1.6: the second is exposed."""
    assert replayed([0.4, 1.0], 0.6, 1.0) == (1.6, 0.6)


def test_launching_delays_what_is_computed_after_it():
    """Launched by 0.45, there at 0.8; the second ready at 1.05, launched by 1.1, there at 1.45, finished at 1.47."""
    assert replayed([0.4, 1.0], 0.35, 1.0, 0.05, 0.02) == (1.47, 0.37)


def test_buckets_queue_for_the_wire():
    """Three at once, 0.6 s each, one after the other; finishing overlaps with the next one's way, but for the last."""
    assert replayed([0.0] * 3, 0.6, 0.0, finish_s=0.5) == (2.3, 2.3)
    assert replayed([0.0] * 3, 0.6, 0.0, finish_s=0.7) == (0.6 + 2.1, 0.6 + 2.1)


@pytest.mark.parametrize(
    ("small", "large", "line"),
    [
        ((10, 1.1), (100, 2.0), (1.0, 0.01)),
        ((10, 0.01), (100, 1.0), (0.0, 0.01)),  # a fixed time below 0
        ((10, 3.0), (100, 2.0), (2.5, 0.0)),  # more bytes in less time
        ((100, 1.0), (100, 1.0), (0.0, 0.01)),  # one measurement
    ],
)
def test_a_line_through_two_measurements(small, large, line):
    found = AlphaBetaCost.through(small, large)
    assert (found.fixed_s, found.s_per_byte) == pytest.approx(line)


@pytest.mark.parametrize("wrong", [(-1.0, 0.0), (0.0, math.inf)])
def test_nonsense_is_refused(wrong):
    with pytest.raises(ConfigurationError):
        AlphaBetaCost(*wrong)
