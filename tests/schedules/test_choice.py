"""Prices and choices: the alpha-beta model by hand, and the algorithm it leads to."""

from __future__ import annotations

import sys

import pytest

from harness.terminal import run
from paceline.errors import ConfigurationError
from paceline.schedules import SCHEDULES, Link, Links, Schedule, Topology, Transfer, choose, price
from paceline.schedules.schedule import HEADER_BYTES, mirror

GIGABIT = Link(latency_s=1e-3, bytes_per_s=125e6)
LOOPBACK = Link(latency_s=2e-5, bytes_per_s=4e9)
CLUSTER = Links(within=LOOPBACK, between=GIGABIT)
MEGABYTE = 1_000_000


def time_s(name, message_bytes, topology, links=CLUSTER, **sizes):
    return price(SCHEDULES[name].build(topology), message_bytes, topology, links, **sizes).time_s


def test_the_model_is_the_textbooks_for_one_rank_a_host():
    """Papers: ring 2(P-1) alpha + 2(P-1)/P n/B; halving-doubling 2 log2 P alpha + the same."""
    topology = Topology.one_rank_a_host(8)
    wire_s = 2 * 7 / 8 * MEGABYTE / 125e6
    assert time_s("ring", MEGABYTE, topology) == pytest.approx(14e-3 + wire_s)
    assert time_s("halving_doubling", MEGABYTE, topology) == pytest.approx(6e-3 + wire_s)
    assert time_s("recursive_doubling", MEGABYTE, topology) == pytest.approx(3e-3 + 3 * MEGABYTE / 125e6)


def test_ranks_of_a_host_share_its_link_each_direction_by_itself():
    """Two hosts of two: hierarchical sends n over each link, a flat ring 3/2 n, an interleaved one 3 n.

    Halving-doubling does as well as hierarchical where the ranks of a host are neighbours, and not otherwise.
    """
    side_by_side, interleaved = Topology((0, 0, 1, 1)), Topology((0, 1, 0, 1))
    n = 100 * MEGABYTE
    for topology in (side_by_side, interleaved):
        assert time_s("hierarchical_ring", n, topology) == pytest.approx(n / 125e6, rel=0.1)
    assert time_s("halving_doubling", n, side_by_side) == pytest.approx(n / 125e6, rel=0.1)
    assert time_s("halving_doubling", n, interleaved) == pytest.approx(2 * n / 125e6, rel=0.1)
    assert time_s("ring", n, side_by_side) == pytest.approx(1.5 * n / 125e6, rel=0.05)
    assert time_s("ring", n, interleaved) == pytest.approx(3 * n / 125e6, rel=0.05)


def test_the_busier_direction_of_a_link_counts():
    """Two ranks of one host serve one each on two others: twice as much leaves a host as arrives at one."""
    topology = Topology((0, 0, 1, 2))
    n = 100 * MEGABYTE
    to_others = (tuple(Transfer(rank, rank + 2, 0, 1, fold=False) for rank in (0, 1)),)
    for rounds in (to_others, mirror(to_others)):
        schedule = Schedule("pairs", 4, 1, rounds)
        assert price(schedule, n, topology, CLUSTER).time_s == pytest.approx(2 * n / 125e6, rel=0.01)


def test_further_messages_and_folding_cost_what_the_links_say():
    """Direct over 4 ranks: 3 messages and 3 headers at first, then 3; each rank folds 3/4 of the message."""
    topology = Topology.one_host(4)
    links = Links(Link(0.0, 1e12, message_s=1.0), GIGABIT, fold_s_per_byte=1e-3)
    assert time_s("direct", 4000, topology, links) == pytest.approx((5 + 2) * 1.0 + 3000 * 1e-3, rel=1e-3)


def test_partial_results_of_16_bit_messages_are_priced_as_sent():
    """8 ranks: direct sends no partial result, halving-doubling after its first round, a ring in P-2 rounds."""
    topology = Topology.one_rank_a_host(8)
    n = 16 * 1000
    per_rank = {
        name: price(
            SCHEDULES[name].build(topology), n, topology, CLUSTER, element_bytes=2, partial_bytes=4
        ).bytes_sent[0]
        for name in ("direct", "halving_doubling", "ring")
    }
    assert per_rank["direct"] == 2 * n * 7 // 8
    assert per_rank["halving_doubling"] == 2 * n * 7 // 8 + (n // 4 + n // 8)
    assert per_rank["ring"] == 2 * n * 7 // 8 + 6 * n // 8


def test_an_empty_message_costs_its_headers_only():
    topology = Topology.one_rank_a_host(4)
    priced = price(SCHEDULES["ring"].build(topology), 0, topology, CLUSTER)
    assert priced.bytes_sent == (0,) * 4
    assert priced.header_bytes == (HEADER_BYTES,) * 4
    assert priced.time_s == GIGABIT.latency_s


@pytest.mark.parametrize(
    ("message_bytes", "topology", "links", "expected"),
    [
        (8, Topology.one_rank_a_host(8), CLUSTER, {"direct", "recursive_doubling"}),
        (100 * MEGABYTE, Topology((0, 0, 0, 1, 1, 1)), CLUSTER, {"hierarchical_recursive_doubling"}),
        (100 * MEGABYTE, Topology((0, 0, 1, 1, 2, 2)), CLUSTER, {"hierarchical_direct"}),
        (
            1 << 20,
            Topology.one_rank_a_host(8),
            Links(LOOPBACK, Link(1e-3, 125e6, 1e-3)),
            {"halving_doubling"},
        ),
        (
            64 << 10,
            Topology.one_rank_a_host(8),
            Links(LOOPBACK, Link(1e-3, 125e6, 2e-3)),
            {"recursive_doubling"},
        ),
    ],
)
def test_the_choice_follows_size_and_topology(message_bytes, topology, links, expected):
    choice = choose(message_bytes, topology, links)
    assert choice.schedule.name in expected
    assert choice.schedule.name == next(iter(choice.prices))
    times = [priced.time_s for priced in choice.prices.values()]
    assert times == sorted(times)


def test_the_choice_is_the_cheapest_of_all_that_fit():
    """Every all-reduce is a candidate; hierarchical ones only where there are hosts with several ranks."""
    flat = choose(4096, Topology.one_host(4), CLUSTER)
    hosts = choose(4096, Topology((0, 0, 1, 1)), CLUSTER)
    assert set(hosts.prices) == set(SCHEDULES)
    assert set(flat.prices) == {name for name in SCHEDULES if "hierarchical" not in name}


def test_the_choice_says_why():
    why = choose(100 * MEGABYTE, Topology((0, 0, 0, 1, 1, 1)), CLUSTER).why
    assert why.startswith("all_reduce of 100,000,000 bytes over 6 ranks on 2 hosts x 3: hierarchical_")
    assert "100,000,000 over a host's link" in why
    assert "; next " in why


def test_one_rank_needs_nothing():
    choice = choose(MEGABYTE, Topology.one_host(1), CLUSTER)
    assert choice.schedule.rounds == ()
    assert choice.prices[choice.schedule.name].time_s == 0


def test_links_are_read_from_words():
    assert Links.parse("within=2e-5/4e9 between=1e-3/125e6") == CLUSTER
    assert Links.parse("within=1/2/3 between=4/5/6") == Links(Link(1, 2, 3), Link(4, 5, 6))
    assert Links.from_numbers(CLUSTER.to_numbers()) == CLUSTER
    for text in (
        "",
        "within=1/2",
        "within=1 between=2",
        "within=0/0 between=1/1",
        "between=1/1 within=x/1",
        "a=1/1",
    ):
        with pytest.raises(ConfigurationError):
            Links.parse(text)


@pytest.mark.processes
def test_schedules_are_there_without_torch(tmp_path):
    """The planner prices schedules where no torch is installed."""
    done = run(
        [sys.executable, "-c", "import sys, paceline.schedules; assert 'torch' not in sys.modules"],
        cwd=tmp_path,
    )
    assert done.code == 0, done.err


@pytest.mark.parametrize("hosts", [(), (1,), (0, 2), (-1, 0)])
def test_topologies_number_their_hosts_from_zero(hosts):
    with pytest.raises(ConfigurationError, match="from 0 without gaps"):
        Topology(hosts)
