"""How near the bounded-loss protocol comes to the wire's rate, in virtual time: whatever else this machine does."""

import numpy as np
import pytest

from datagram_networks import Switch, time_of_sums

RATE, MEGABYTES, PAYLOAD = 100e6, 2.0, 1432


@pytest.mark.parametrize(
    ("ranks", "lose", "ratio"),
    [(4, 0.0, 0.96), (4, 0.01, 0.93), (4, 0.03, 0.85), (2, 0.0, 0.96), (8, 0.0, 0.94)],
)
def test_a_sum_takes_about_as_long_as_its_bytes_on_the_wire(ranks, lose, ratio):
    """`ratio` of the time is the transfer of bytes with their headers, what was lost sent twice; 2 MB, two phases."""
    elements = int(MEGABYTES * 250_000)
    vectors = [[np.ones(1, np.float32), np.ones(elements, np.float32)] for _ in range(ranks)]
    switch = Switch(ranks, RATE, lose=lose)
    (_, took_us), _ = time_of_sums(switch, vectors, payload=PAYLOAD)
    bytes_sent = 2 * (ranks - 1) / ranks * elements * 4 * (PAYLOAD + 82) / PAYLOAD / (1 - lose)
    assert bytes_sent * 8 / RATE * 1e6 > ratio * took_us, (bytes_sent * 8 / RATE * 1e6, took_us)
    for of_rank in vectors:
        assert (of_rank[1] == ranks).all()
    assert switch.dropped == 0
