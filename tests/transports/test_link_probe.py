"""The probe: agreed on by all ranks, right about links whose properties are known, and easily overridden."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from harness.in_memory import InMemoryNetwork
from paceline.errors import ConfigurationError
from paceline.schedules import Link, Links, Topology
from paceline.transports import link_probe
from paceline.transports.link_probe import ENVIRONMENT, find_links

WITHIN = Link(2e-5, 4e9, 1e-6)
BETWEEN = Link(1e-3, 125e6, 1e-5)


class Clocks:
    """A clock for each rank's thread, which only messages move on."""

    def __init__(self):
        self.local = threading.local()

    def perf_counter(self):
        return getattr(self.local, "now_s", 0.0)

    def advance(self, seconds):
        self.local.now_s = self.perf_counter() + seconds


def simulate(transport, topology, clocks):
    """Let an in-memory transport take the time that `WITHIN` and `BETWEEN` say; rank 1 a little longer."""
    deliver = transport._exchange
    hosts = topology.host_of_rank
    num_owners = min(map(len, topology.ranks_of_host))

    def exchange(sends, receives, timeout_s, on_received):
        deliver(sends, receives, timeout_s, on_received)
        if sends and receives:
            between = hosts[sends[0][0]] != hosts[transport.rank]
            link = BETWEEN if between else WITHIN
            sharing = num_owners if between else max(map(len, topology.ranks_of_host))
            num_bytes = sum(tensor.nbytes for _, tensor in sends) * sharing
            clocks.advance(link.latency_s + (len(sends) - 1) * link.message_s + num_bytes / link.bytes_per_s)

    transport._exchange = exchange


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 0, 1, 2), (0, 0, 0, 1), (0, 1), (0, 0, 0), (0,)])
def test_known_links_are_found_and_agreed_on(monkeypatch, hosts):
    topology, clocks = Topology(hosts), Clocks()
    monkeypatch.setattr(link_probe, "time", clocks)
    network = InMemoryNetwork(len(hosts))
    for transport in network.transports:
        simulate(transport, topology, clocks)
    found = network.run(lambda transport: find_links(transport, topology, 20.0))
    assert all(links == found[0] for links in found)
    sizes = list(map(len, topology.ranks_of_host))
    for link, known, exists in (
        (found[0].within, WITHIN, max(sizes) > 1),
        (found[0].between, BETWEEN, len(sizes) > 1),
    ):
        if exists:
            assert link.latency_s == pytest.approx(known.latency_s, rel=0.01)
            assert link.bytes_per_s == pytest.approx(known.bytes_per_s, rel=0.01)
            assert link.message_s == pytest.approx(known.message_s, rel=0.1)


def test_rank_0s_environment_counts_and_nothing_is_measured(monkeypatch):
    """Ranks in different environments must still choose the same."""
    values = iter(["within=1e-5/1e9 between=1e-4/1e8", "fast", "faster"])
    environ = SimpleNamespace(get=lambda _: next(values))
    monkeypatch.setattr(link_probe, "os", SimpleNamespace(environ=environ))
    monkeypatch.setattr(link_probe, "probe", None)
    found = InMemoryNetwork(3).run(lambda transport: find_links(transport, Topology.one_host(3), 20.0))
    assert found == [Links(Link(1e-5, 1e9), Link(1e-4, 1e8))] * 3


def test_the_environment_overrides(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, "within=1e-5/1e9 between=1e-4/1e8")
    found = InMemoryNetwork(2).run(lambda transport: find_links(transport, Topology((0, 1)), 20.0))
    assert found == [Links(Link(1e-5, 1e9), Link(1e-4, 1e8))] * 2
    monkeypatch.setenv(ENVIRONMENT, "fast")
    outcomes = InMemoryNetwork(2).run(lambda transport: find_links(transport, Topology((0, 1)), 0.2))
    assert isinstance(outcomes[0], ConfigurationError)
    assert "within=" in str(outcomes[0])


def test_real_clocks_give_links_that_can_be_priced():
    """Through memory, on one host and on two: whatever is measured is finite and positive."""
    torch.set_num_threads(1)
    for hosts in ((0, 0, 0), (0, 1, 1)):
        links = InMemoryNetwork(3).run(
            lambda transport, hosts=hosts: find_links(transport, Topology(hosts), 20.0)
        )[0]
        assert isinstance(links, Links), links
        assert 0 < links.within.latency_s < 60
        assert links.between.bytes_per_s > 0
