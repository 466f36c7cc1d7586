"""The simulator against another one that knows nothing of it: every message an event, every rank a clock of its own.

Messages of one rank queue for its host's link; a rank goes on to its next round when it has sent and received all of
its messages of this one. So ranks drift apart, and wait for each other only where bytes make them.
"""

import heapq
import random

import pytest

from paceline_plan import (
    Cluster,
    HostLink,
    LayerTimes,
    RecordedWorkload,
    ReductionPlan,
    collective_cost,
    simulate,
)
from paceline_plan.round_patterns import candidates, patterns

Clocks = list[float]


def all_reduce_events(cluster: Cluster, name: str, size: float, starts_s: Clocks) -> Clocks:
    """When each rank is done with an all-reduce that it begins at its own time."""
    rounds = []
    for pattern in patterns(name, cluster.topology):
        messages = list(
            zip(pattern.sources.tolist(), pattern.targets.tolist(), pattern.ratios.tolist(), strict=True)
        )
        rounds += [messages] * pattern.repeat
    clocks = list(starts_s)
    hosts = cluster.topology.host_of_rank
    sends_from = [0.0] * cluster.num_hosts  # when a host's link is free again, out and in
    receives_from = [0.0] * cluster.num_hosts
    for messages in rounds:
        done = list(clocks)
        events = [(clocks[source], i) for i, (source, _, _) in enumerate(messages)]
        heapq.heapify(events)
        while events:
            ready_s, i = heapq.heappop(events)
            source, target, ratio = messages[i]
            out, into = hosts[source], hosts[target]
            link = cluster.links[out]
            if out == into:
                arrived_s = ready_s + cluster.within.latency_s + ratio * size / cluster.within.bytes_per_s
            else:
                rate = min(link.bytes_per_s, cluster.links[into].bytes_per_s)
                begun_s = max(ready_s, sends_from[out], receives_from[into] - link.latency_s)
                flows_s = ratio * size / rate
                sends_from[out] = begun_s + ratio * size / link.bytes_per_s
                arrived_s = begun_s + flows_s + max(link.latency_s, cluster.links[into].latency_s)
                receives_from[into] = arrived_s
            done[source] = max(done[source], sends_from[out] if out != into else arrived_s)
            done[target] = max(done[target], arrived_s)
        clocks = done
    return clocks


def test_an_all_reduce_from_unequal_starts_ends_when_the_last_one_would() -> None:
    """Equal links: every rank needs the last one's bytes, so all end when it would have if all had started with it."""
    chance = random.Random(1)
    for num_ranks in (2, 3, 4, 8, 16):
        cluster = Cluster.of_equal_hosts(num_ranks, HostLink(1e8, 1e-4))
        starts_s = [chance.random() * 0.05 for _ in range(num_ranks)]
        for name in candidates(cluster.topology):
            uneven = name.endswith("doubling") and num_ranks & (num_ranks - 1)  # some ranks skip a round
            if name == "direct" or uneven:
                continue  # several messages meet at one link: a queue in the one, a fluid in the other
            found = max(all_reduce_events(cluster, name, 2**20 * 3, starts_s))
            wanted = max(starts_s) + collective_cost(cluster, name).of(2**20 * 3)
            assert found == pytest.approx(wanted, rel=0.01), (name, num_ranks)


def test_unequal_links_cost_what_the_slowest_makes_them() -> None:
    """A link ten times slower, anywhere: the rounds it takes part in wait for it; within a tenth."""
    for num_ranks in (2, 4, 8, 16):
        for slow in (0, num_ranks - 1):
            links = [HostLink(1e8, 1e-4)] * num_ranks
            links[slow] = HostLink(1e7, 1e-3)
            cluster = Cluster((1,) * num_ranks, tuple(links))
            for name in ("ring", "halving_doubling", "circulant"):
                found = max(all_reduce_events(cluster, name, 2**22, [0.0] * num_ranks))
                wanted = collective_cost(cluster, name).of(2**22)
                assert found == pytest.approx(wanted, rel=0.1), (name, num_ranks, slow)


def test_steps_of_unequal_ranks() -> None:
    """Whole steps: ranks that compute at different speeds, buckets that follow each other."""
    chance = random.Random(2)
    layers = tuple(LayerTimes(str(i), 0.001, 0.004, (2**20,)) for i in range(12))
    load, plan = RecordedWorkload("made up", "made up", layers), ReductionPlan((2**21,), "ring")
    for num_ranks in (2, 5, 8):
        for rate in (1e9, 2e8, 5e7):
            speeds = tuple(0.5 + chance.random() for _ in range(num_ranks))
            cluster = Cluster((1,) * num_ranks, (HostLink(rate, 1e-4),) * num_ranks, speeds=speeds)
            free_s = [0.0] * num_ranks
            for number in range(6):
                ready_s = [(load.forward_s + 0.004 * 2 * (number + 1)) / speed for speed in speeds]
                starts_s = [max(pair) for pair in zip(ready_s, free_s, strict=True)]
                free_s = all_reduce_events(cluster, "ring", 2**21, starts_s)
            assert simulate(load, cluster, plan).step_s == pytest.approx(max(free_s), rel=0.02)
