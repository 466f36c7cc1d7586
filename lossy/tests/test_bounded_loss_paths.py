"""Datagrams over several paths, a port each, in virtual time: every path carries what it can, and may fail."""

import numpy as np
import pytest

from harness.datagram_networks import Switch, strangers, time_of_sums
from paceline_lossy.datagrams import endpoint_state as e

pytestmark = pytest.mark.compiles

PAYLOAD, RANKS, ELEMENTS = 1432, 4, 500_000


def _sums(switch, more, ranks=RANKS, bound=0.0):
    """Sum a small vector, and one of 2 MB; returns the microseconds of the latter, and the endpoints."""
    vectors = [[np.ones(1, np.float32), np.ones(ELEMENTS, np.float32)] for _ in range(ranks)]
    (_, took_us), ends = time_of_sums(switch, vectors, bound, PAYLOAD, more=more)
    for of_rank in vectors:
        assert (of_rank[1] == ranks).all()
    assert strangers(ends) == 0
    return took_us, ends


def _wire_us(rate, lose=0.0):
    bytes_sent = 2 * (RANKS - 1) / RANKS * ELEMENTS * 4 * (PAYLOAD + 82) / PAYLOAD / (1 - lose)
    return bytes_sent * 8 / rate * 1e6


@pytest.mark.parametrize(
    ("rates", "lose", "ways_us", "least"),
    [
        ((100e6, 100e6), 0.0, (50, 50), 0.9),
        ((100e6, 40e6), 0.0, (50, 50), 0.9),
        ((100e6, 40e6), 0.01, (50, 50), 0.86),  # 0.875 to 0.91 by the seed
        ((60e6, 60e6), 0.0, (50, 3000), 0.9),
    ],
)
def test_unequal_paths_carry_nine_tenths_of_the_sum_of_their_rates(rates, lose, ways_us, least):
    """In the time that is left after the headers' part: as one path's rate is measured."""
    paths = [
        Switch(RANKS, rate, lose=lose, way_us=way_us, seed=number)
        for number, (rate, way_us) in enumerate(zip(rates, ways_us, strict=True))
    ]
    took_us, ends = _sums(paths[0], paths[1:])
    assert _wire_us(sum(rates), lose) > least * took_us, (_wire_us(sum(rates), lose), took_us)
    if lose == 0:
        assert sum(int(end.tables.numbers[e.REPEATED]) for end in ends) == 0


def test_ports_that_share_a_path_share_its_rate():
    """Four ports, of which a hash puts three on the slower path: each finds its part."""
    slow, fast = Switch(RANKS, 40e6), Switch(RANKS, 100e6)
    took_us, _ = _sums(slow, [fast, slow, slow])
    assert _wire_us(140e6) > 0.8 * took_us, (
        _wire_us(140e6),
        took_us,
    )  # 0.83 to 0.86, by who begins with which chunk


def test_a_path_that_leads_nowhere_costs_its_rate_and_little_more():
    took_us, ends = _sums(Switch(RANKS, 100e6), [Switch(RANKS, 100e6, lose=1.0)])
    assert _wire_us(100e6) > 0.75 * took_us, (_wire_us(100e6), took_us)
    assert all((end.tables.ways[1::2, e.W_BACKOFF] > 0).sum() == RANKS - 1 for end in ends)


@pytest.mark.parametrize("lose", [0.3, 0.6])
def test_a_path_that_loses_a_third_of_all_packets_is_used_for_what_it_carries(lose):
    took_us, _ = _sums(Switch(RANKS, 100e6), [Switch(RANKS, 100e6, lose=lose)])
    assert took_us < 1.15 * _wire_us(100e6) / 0.96


def test_within_a_bound_nothing_more_is_lost_than_the_paths_lose():
    """What is under way on the slower path is not taken for lost because all of the faster one is there."""
    vectors = [[np.ones(ELEMENTS, np.float32)] for _ in range(RANKS)]
    paths = [Switch(RANKS, 100e6), Switch(RANKS, 20e6, way_us=8000)]
    _, ends = time_of_sums(paths[0], vectors, 0.1, PAYLOAD, more=paths[1:])
    assert sum(path.dropped + path.lost for path in paths) == 0
    for end in ends:
        masks = [buffers[2] for buffers in end._buffers]
        assert not any(mask.any() for mask in masks)


def test_paths_that_lose_much_are_not_taken_for_one_way_streets():
    """All ports are silent now and then, hardly for long: nearly all answers keep to the ports of what they answer."""
    paths = [Switch(RANKS, 100e6, lose=0.2, seed=seed) for seed in (1, 2)]
    _, ends = _sums(paths[0], paths[1:])
    turned = sum(int((end.tables.peers[:, e.P_ANSWERS_BY] > 0).sum()) for end in ends)
    assert turned <= 4, f"of {RANKS * (RANKS - 1)}"


class OneWay(Switch):
    """A path that nothing takes from these ranks."""

    def __init__(self, ranks, rate_bits_per_s, deaf_to, **options):
        super().__init__(ranks, rate_bits_per_s, **options)
        self._deaf_to = deaf_to

    def send(self, rank, peer, datagram, now_us):
        if rank not in self._deaf_to:
            super().send(rank, peer, datagram, now_us)


def test_the_first_port_may_be_the_one_that_leads_nowhere():
    """Answers and ENDs take the other one."""
    took_us, ends = _sums(Switch(RANKS, 100e6, lose=1.0), [Switch(RANKS, 100e6)])
    assert _wire_us(100e6) > 0.75 * took_us, (_wire_us(100e6), took_us)
    for end in ends:
        silent = end.tables.ways[:, e.W_BACKOFF].reshape(RANKS, 2) > 0
        assert silent.tolist() == [[peer != end.rank, False] for peer in range(RANKS)]


def test_one_way_streets_do_not_keep_ranks_from_knowing_what_arrived():
    """The second port leads from rank 0 to the others, and nothing comes back on it: it is used all the same."""
    paths = [Switch(RANKS, 50e6), OneWay(RANKS, 50e6, {1, 2, 3})]
    _, ends = _sums(paths[0], paths[1:])
    assert (ends[0].tables.ways[2:, e.W_BACKOFF] == 0).all()
    for end in ends[1:]:
        assert end.tables.ways[1, e.W_BACKOFF] > 0, "by this port it does not reach rank 0"
    repeated = sum(int(end.tables.numbers[e.REPEATED]) for end in ends)
    chunks = 2 * (RANKS - 1) * ELEMENTS * 4 // PAYLOAD
    assert repeated < 0.05 * chunks, (repeated, chunks)


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("elements", [1, ELEMENTS])
@pytest.mark.parametrize("closed_by_first", [0, 1])
def test_ways_that_are_open_in_one_direction_each_are_enough(closed_by_first, elements, servers):
    """By one port only rank 0 reaches rank 1, by the other only rank 1 reaches rank 0.

    A server has nothing of its own to lose there before everything was pushed; of one datagram there is no other.
    """
    paths = [OneWay(2, 50e6, {rank}) for rank in (closed_by_first, 1 - closed_by_first)]
    vectors = [[np.full(elements, rank + 1, np.float32)] for rank in range(2)]
    (took_us,), ends = time_of_sums(paths[0], vectors, 0.0, PAYLOAD, more=paths[1:], servers=servers)
    assert all((of_rank[0] == (2 if servers else 3)).all() for of_rank in vectors)
    assert took_us < 1_000_000 + 2 * elements * 4 * 8 / 50, took_us
    if elements > 1:
        for end in ends:
            silent = end.tables.ways[2 * (1 - end.rank) :][:2, e.W_BACKOFF] > 0
            assert silent.tolist() == [closed_by_first == end.rank, closed_by_first != end.rank]
