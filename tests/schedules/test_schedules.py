"""Every schedule, for 1 to 17 ranks: followed symbolically, each rank's contribution arrives exactly once."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from harness.followed_schedules import check_rules, contributions, follow, topologies
from paceline.errors import ConfigurationError
from paceline.process_group.executor import part_of
from paceline.schedules import (
    SCHEDULES,
    Link,
    Links,
    Schedule,
    Topology,
    Transfer,
    cut,
    flat,
    halving_doubling,
    price,
)
from paceline.schedules.schedule import mirror

FREE = Links(Link(0.0, 1e9), Link(0.0, 1e9))


CASES = [(name, num_ranks) for name in SCHEDULES for num_ranks in range(1, 18)]


def built(name, num_ranks):
    """The schedule, over every topology that makes a difference to it."""
    algorithm = SCHEDULES[name]
    for topology in (
        dict.fromkeys(topologies(num_ranks)) if algorithm.needs_hosts else [Topology.one_host(num_ranks)]
    ):
        yield topology, algorithm.build(topology)


@pytest.mark.parametrize(("name", "num_ranks"), CASES)
def test_every_rank_ends_with_the_sum(name, num_ranks):
    """Each contribution is folded once, and ranks that share a result computed it by the same expression."""
    ranks = list(range(num_ranks))
    for topology, schedule in built(name, num_ranks):
        held = follow(schedule)
        assert schedule.num_ranks == topology.num_ranks
        assert all(contributions(block) == ranks for block in held[0])
        assert all(held[rank] == held[0] for rank in ranks)


@pytest.mark.parametrize("num_ranks", range(1, 18))
@pytest.mark.parametrize("algorithm", [flat.direct, flat.circulant, flat.ring])
def test_an_all_gather_brings_every_block_to_every_rank(algorithm, num_ranks):
    schedule, ranks = algorithm.all_gather(num_ranks), list(range(num_ranks))
    assert schedule.num_blocks == num_ranks
    assert all(held == ranks for held in follow(schedule))


def is_power_of_two(number):
    return number & (number - 1) == 0


@pytest.mark.parametrize("num_ranks", range(1, 18))
def test_rounds_and_bytes_are_the_closed_formulas(num_ranks):
    """A message of P * 2^4 elements, so that all blocks are equal: bytes are exact multiples of n/P (or n/2^k)."""
    n = num_ranks * 16 * 720720
    log2 = num_ranks.bit_length() - 1
    ceil_log2 = (num_ranks - 1).bit_length()
    optimal = n * (num_ranks - 1) // num_ranks
    even = {
        "ring": (2 * (num_ranks - 1), 2 * optimal),
        "circulant": (2 * ceil_log2, 2 * optimal),
        "direct": (2 if num_ranks > 1 else 0, 2 * optimal),
    }
    if is_power_of_two(num_ranks):
        even["halving_doubling"] = (2 * log2, 2 * optimal)
        even["recursive_doubling"] = (log2, log2 * n)
    topology = Topology.one_host(num_ranks)
    for name, (rounds, num_bytes) in even.items():
        priced = price(SCHEDULES[name].build(topology), n, topology, FREE)
        assert (priced.rounds, set(priced.bytes_sent)) == (rounds, {num_bytes}), name


@pytest.mark.parametrize("num_ranks", [p for p in range(1, 18) if not is_power_of_two(p)])
def test_binary_blocks_cost_no_round_and_a_share_for_each_neighbour(num_ranks):
    n = 16 * 1000
    topology = Topology.one_host(num_ranks)
    priced = price(halving_doubling.all_reduce(num_ranks), n, topology, FREE)
    assert priced.rounds == 2 * math.floor(math.log2(num_ranks))
    sizes = [1 << bit for bit in reversed(range(5)) if num_ranks >> bit & 1]
    expected = []
    for place, size in enumerate(sizes):
        num_neighbours = (place > 0) + (place < len(sizes) - 1)
        expected += [2 * n * (size - 1) // size + num_neighbours * n // size] * size
    assert list(priced.bytes_sent) == expected
    assert max(expected) <= 2 * n


@pytest.mark.parametrize("num_ranks", [3, 5, 6, 7, 9, 12, 17])
def test_recursive_doubling_brings_ranks_beyond_the_power_of_two_in_and_out(num_ranks):
    topology = Topology.one_host(num_ranks)
    priced = price(SCHEDULES["recursive_doubling"].build(topology), 1000, topology, FREE)
    assert priced.rounds == math.floor(math.log2(num_ranks)) + 2


@pytest.mark.parametrize(("num_hosts", "each"), [(2, 2), (2, 4), (3, 2), (4, 4), (5, 3)])
def test_hierarchical_sends_the_least_over_each_link_and_all_ranks_of_a_host_share_it(num_hosts, each):
    n = num_hosts * each * 16
    topology = Topology(tuple(rank // each for rank in range(num_hosts * each)))
    least = 2 * n * (num_hosts - 1) // num_hosts
    over_ring = price(SCHEDULES["hierarchical_ring"].build(topology), n, topology, FREE)
    assert over_ring.bytes_over_links == (least,) * num_hosts
    assert len(set(over_ring.bytes_sent)) == 1
    assert over_ring.rounds == 2 * (num_hosts - 1) + 2
    flat = price(SCHEDULES["ring"].build(topology), n, topology, FREE)
    assert flat.bytes_over_links == (2 * n * (num_hosts * each - 1) // (num_hosts * each),) * num_hosts


def test_a_flat_ring_over_interleaved_hosts_sends_every_message_over_a_link():
    topology = Topology((0, 1, 0, 1))
    n = 4000
    flat = price(SCHEDULES["ring"].build(topology), n, topology, FREE)
    assert flat.bytes_over_links == (3 * n, 3 * n)
    assert price(SCHEDULES["hierarchical_ring"].build(topology), n, topology, FREE).bytes_over_links == (n, n)


def test_hosts_of_unequal_size_have_as_many_shards_as_the_smallest_has_ranks():
    topology = Topology((0, 0, 0, 1, 1))
    assert SCHEDULES["hierarchical_ring"].build(topology).num_blocks == 2 * 2


@pytest.mark.parametrize("num_elements", [0, 1, 2, 16, 17, 18, 97, 1009])
@pytest.mark.parametrize("num_blocks", range(1, 18))
def test_cut_covers_the_message_with_blocks_that_differ_by_at_most_one(num_elements, num_blocks):
    cuts = cut(num_elements, num_blocks)
    sizes = [last - first for first, last in pairwise(cuts)]
    assert len(cuts) == num_blocks + 1
    assert sum(sizes) == num_elements
    assert max(sizes) - min(sizes) <= 1


def test_the_mirror_of_a_mirror_is_the_original():
    schedule = SCHEDULES["circulant"].build(Topology.one_host(6))
    assert mirror(mirror(schedule.rounds)) == schedule.rounds


def test_each_rank_sends_and_receives_a_header_first():
    """Whoever takes part is checked once on each side, and only where the schedule says so."""
    for name, num_ranks in CASES:
        topology, schedule = next(built(name, num_ranks))
        for rank in range(topology.num_ranks):
            rounds = part_of(schedule, rank).rounds
            sends = [round_.sends for round_ in rounds if round_.sends]
            receives = [round_.receives for round_ in rounds if round_.receives]
            assert all(message.introduces for message in (sends[0] if sends else ())), name
            assert all(message.introduces for message in (receives[0] if receives else ())), name


@pytest.mark.parametrize("num_ranks", [2, 5, 8])
def test_what_travels_as_a_partial_result(num_ranks):
    """A direct all-reduce sends none; a ring's reduce-scatter all but its first round's."""
    topology = Topology.one_host(num_ranks)
    direct = SCHEDULES["direct"].build(topology)
    assert not any(partial for round_ in direct.partial for partial in round_)
    ring = SCHEDULES["ring"].build(topology)
    assert [all(round_) for round_ in ring.partial] == [
        0 < number < num_ranks - 1 for number in range(2 * (num_ranks - 1))
    ]


def transfer(source, target, first=0, last=1, fold=True):
    return Transfer(source, target, first, last, fold)


@pytest.mark.parametrize(
    ("rounds", "reason"),
    [
        ([[transfer(0, 3)]], "no such rank"),
        ([[transfer(1, 1)]], "sends to itself"),
        ([[transfer(0, 1, 0, 3)]], "no such blocks"),
        ([[transfer(0, 1, 1, 1)]], "no such blocks"),
        ([[transfer(0, 1, fold=False), transfer(1, 0, fold=False)]], "rule 5"),
        ([[transfer(0, 1, fold=False)], [transfer(1, 2)]], "rule 4"),
        ([[transfer(0, 1, fold=False)], [transfer(0, 2)]], "rule 4"),
        ([[transfer(0, 1, fold=False)], [transfer(2, 1)]], "rule 4"),
        ([[transfer(0, 1, fold=False)], [transfer(2, 0)]], "rule 4"),
    ],
)
def test_the_check_of_the_rules_finds_each_mistake(rounds, reason):
    with pytest.raises(AssertionError, match=reason):
        check_rules(Schedule("wrong", 3, 2, tuple(map(tuple, rounds))))


def test_prices_refuse_what_does_not_fit():
    ring = SCHEDULES["ring"].build(Topology.one_host(3))
    with pytest.raises(ConfigurationError, match="3 ranks"):
        price(ring, 8, Topology.one_host(4), FREE)
    with pytest.raises(ConfigurationError, match="4-byte elements"):
        price(ring, 6, Topology.one_host(3), FREE, element_bytes=4)
