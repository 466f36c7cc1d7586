"""Sums by the first ranks, as servers, for the others: endpoints in one process, a network that the test plays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.datagram_networks import TICK_US, Mailer, Network, endpoints
from paceline_lossy import Bound
from paceline_lossy.lossy_sums import add_survivors

pytestmark = pytest.mark.compiles

LONGEST_US = 400_000_000


def run(network, servers, given_, bound):
    """Sum the workers' vectors, all under way together; everybody's losses, who sent whom how much, and the results."""
    ranks = servers + len(given_)
    ends = endpoints(ranks, servers=servers)
    vectors = [[np.full_like(vector, 1e9) for vector in given_[0]] for _ in range(servers)]
    vectors += [[vector.copy() for vector in of_worker] for of_worker in given_]
    mailer, now_us = Mailer(ends[0]), 1000
    losses, traffic = [[] for _ in ends], np.zeros((ranks, ranks), np.int64)
    for rank, end in enumerate(ends):
        for vector in vectors[rank]:
            end.begin(vector, bound, now_us)
    while min(map(len, losses)) < len(given_[0]):
        assert now_us < LONGEST_US, "it does not end"
        for rank, end in enumerate(ends):
            for peer, datagram in mailer.take(end, now_us):
                traffic[rank, peer] += len(datagram)
                network.carry(now_us, peer, datagram)
        now_us += TICK_US if network.under_way else 20 * TICK_US
        for _, peer, datagram in network.arrived(now_us):
            mailer.hand(ends[peer], [datagram], now_us)
        for rank, end in enumerate(ends):
            losses[rank] += end.take_finished()
    return losses, traffic, vectors


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    servers=st.integers(1, 3),
    workers=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=4),
    lose=st.sampled_from([0.0, 0.05, 0.3]),
    delay=st.sampled_from([0.0, 0.3]),
    bound=st.sampled_from([0.0, 0.1, 0.5]),
    is_scaled=st.booleans(),
)
def test_workers_have_the_sum_of_what_arrived(seed, servers, workers, sizes, lose, delay, bound, is_scaled):
    """The same bits on all workers: per element the survivors' sum, by workers over survivors if it is scaled."""
    dice = np.random.default_rng(seed)
    given_ = [[dice.integers(-99, 99, size).astype(np.float64) for size in sizes] for _ in range(workers)]
    losses, traffic, vectors = run(
        Network(seed, lose, delay=delay), servers, given_, Bound(bound, is_scaled=is_scaled)
    )
    assert traffic[:servers, :servers].sum() == traffic[servers:, servers:].sum() == 0
    for i, size in enumerate(sizes):
        by_number = [sorted(each, key=lambda one: one.collective)[i] for each in losses]
        told = by_number[servers]
        here = np.ones((workers, size))
        for source, first, end in told.ranges:
            assert servers <= source, "servers give nothing, so nothing of theirs is lost"
            here[source - servers, first:end] = 0
        stacked = np.stack([of_worker[i] for of_worker in given_])
        expected = (stacked * here).sum(0)
        if is_scaled:
            expected *= workers / np.maximum(1, here.sum(0))
        for worker in range(servers, servers + workers):
            np.testing.assert_allclose(vectors[worker][i], expected, rtol=1e-12, atol=1e-9)
            assert vectors[worker][i].tobytes() == vectors[servers][i].tobytes()
            assert by_number[worker].ranges.tolist() == told.ranges.tolist()
        for server in range(servers):
            assert told.missing[server] <= bound * told.expected[server]
            assert by_number[server].missing[server] == told.missing[server]
        assert sum(told.missing[servers:]) == sum(told.expected[servers:]) == 0
        if servers == 1:
            assert told.expected[0] == workers * -(-size * 8 // 64)


def test_a_lossy_network_makes_use_of_the_bound_and_the_estimate_is_unbiased():
    """Workers push 1, 2, 3; over many losses the mean of the estimates is their sum, and of plain sums it is less."""
    estimates, plain, lost = [], [], 0
    for seed in range(12):
        for is_scaled, into in ((True, estimates), (False, plain)):
            given_ = [[np.full(3000, worker + 1, np.float32)] for worker in range(3)]
            losses, _, vectors = run(Network(seed, lose=0.15), 2, given_, Bound(0.4, is_scaled=is_scaled))
            lost += sum(losses[2][0].missing)
            into.append(vectors[2][0].mean())
    assert lost > 100
    assert abs(np.mean(estimates) - 6) < 3 * np.std(estimates) / np.sqrt(len(estimates)) + 0.05
    assert np.mean(plain) < 5.6


@pytest.mark.parametrize("is_scaled", [True, False])
def test_what_nobody_gave_is_zero(is_scaled):
    """With an own contribution that takes its place, without one there is nothing to put there."""
    staged, arrived = np.array([[1.0, 2, 3], [10, 20, 30]]), np.array([[1, 0, 0], [1, 1, 0]], bool)
    result = np.empty(3)
    add_survivors(result, None, staged, arrived, 5, 1, is_scaled)
    assert result.tolist() == [11, 40 if is_scaled else 20, 0]


def test_a_server_reports_its_own_shard_whatever_an_earlier_sum_left_in_its_memory():
    """Of other servers' shards it hears nothing, and a larger sum before had its own losses where theirs would be."""
    ends = endpoints(4, servers=2)
    for end in ends:
        end.begin(np.ones(40, np.float32), Bound(0.5), 1000)
    for server in ends[:2]:
        server._buffers[0][2][:] = 255
    mailer, told = Mailer(ends[0]), [[] for _ in ends]
    for now_us in range(1000, 100 * TICK_US, TICK_US):
        for rank, end in enumerate(ends):
            for peer, datagram in mailer.take(end, now_us):
                mailer.hand(ends[peer], [datagram], now_us)
            told[rank] += end.take_finished()
    assert [sum(losses.missing) for (losses,) in told] == [0, 0, 0, 0]
