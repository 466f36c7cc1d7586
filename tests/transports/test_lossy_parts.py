"""A long vector is summed in parts: what is lost of it is told as of one."""

import numpy as np

from paceline.transports import Bound, Sum
from paceline.transports.bounded_loss.lossy_link import PART_BYTES, _cuts, _Launched
from paceline.transports.lossy_transport import Losses


def losses(number, missing, ranges):
    return Losses(number, missing, (5, 5), np.array(ranges, np.int64).reshape(-1, 3))


def test_losses_of_parts_are_those_of_the_vector():
    """Whatever part finishes first: elements count from the vector's beginning, and it is done with the last."""
    vector = np.zeros(2 * PART_BYTES // 4 + 3, np.float32)
    launched = Sum(vector, Bound(0.1))
    cuts = _cuts(launched)
    per_part = PART_BYTES // 4
    assert cuts == [0, per_part, 2 * per_part, len(vector)]
    whole = _Launched(launched, 3)
    whole.take(per_part, losses(4, (1, 0), [[1, 10, 20]]))
    whole.take(2 * per_part, losses(5, (0, 0), []))
    assert not launched.wait(0)
    whole.take(0, losses(3, (0, 2), [[0, 1, 2], [1, 7, 9]]))
    assert launched.wait(0)
    found = launched.losses
    assert found.collective == 3
    assert found.missing == (1, 2)
    assert found.expected == (15, 15)
    assert found.ranges.tolist() == [[0, 1, 2], [1, 7, 9], [1, per_part + 10, per_part + 20]]


def test_a_vector_with_a_priority_is_one_part():
    vector = np.zeros(3 * PART_BYTES, np.float32)
    assert _cuts(Sum(vector, Bound(0.1, priority=1))) == [0, len(vector)]
    assert _cuts(Sum(vector[:1], Bound(0.1))) == [0, 1]
