"""The search for the host whose link is slow, lossy or far, in the counters of every connection between ranks.

Rates are acknowledged bytes over the time in which something was not yet acknowledged. Which of a link's two directions
is slow cannot be told from that: acknowledgements wait in the same queue. It is told by the rate at which data arrive
while some do, at the host and at those that it sends to. In a ring others wait for the slow one, so that their mean
falls, too, but data arrive there fast, with breaks. So the lowest means of a host have to be far below the others'. Or
one direction's arrivals are far below, and its means a little.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median

from paceline.observe.run_reading import Run
from paceline.observe.run_records import LinkCounters, Sample

# The best rate at a slow host over the worst elsewhere; arrivals one way over elsewhere, if the rate is lower at all.
_SLOW, _LOWER = 0.7, 0.85
_WITHOUT_BREAKS = 2.0  # arrivals over the mean: 1.0 to 1.5 on the slow way, 5 and more where it is the other
# Segments resent, and over any other connection's; so many are why a connection is slow, not what its queue drops.
_LOSSY, _MORE_LOST, _SLOW_BY_LOSS = 0.005, 2.0, 0.01
_FAR, _FAR_S = 3.0, 0.002  # the shortest round trip over the others', and at least
_SEGMENT_BYTES = 1448
_LEAST_BYTES = 0.1  # of the busiest connection: others carry no gradients


@dataclass(frozen=True)
class Edge:
    """The traffic from one rank to another."""

    source: int  # whose counters they are
    target: int  # who is at the other end
    sent_bytes: int  # acknowledged between the first and the last sample
    busy_s: float  # with something not yet acknowledged
    num_resent: int  # segments
    least_rtt_s: float  # the shortest round trip seen
    kind: str = "tcp"  # "tcp" or "udp"
    arrival_bytes_per_s: float = 0.0  # while some arrive; 0: not known
    num_steps: int = 1  # between the samples

    @property
    def bytes_per_s(self) -> float:
        return self.sent_bytes / max(self.busy_s, 1e-6)

    @property
    def lost_ratio(self) -> float:
        return self.num_resent / max(1.0, self.sent_bytes / _SEGMENT_BYTES)


@dataclass(frozen=True)
class SlowLink:
    """A rank whose connections differ from all others."""

    rank: int  # whose host's link it is
    kind: str  # "rate", "loss" or "delay"
    value: float  # bytes a second, the share of segments lost, or seconds
    others: float  # the same of the other connections
    peer: int | None = None  # with "loss": to whom
    direction: str = ""  # with "rate": "towards" or "from" the rank's host, "both"; "": not known
    step_bytes: float = 0.0  # with "rate": what its busiest connection carries each step


def edges_of(run: Run) -> tuple[Edge, ...]:
    """Return the connections that carried a good part of the gradients, by the addresses of their two ends."""
    owner, arrivals = {}, {}
    for rank in run.ranks:
        for link in _links(rank.samples[-1:]):
            owner[link.local, link.remote] = rank.header.rank
            arrivals[link.remote, link.local] = link.arrival_bytes_per_s  # of what the other end sends
    found: dict[tuple[int, int], Edge] = {}
    for rank in run.ranks:
        early = {(x.local, x.remote): (at, x) for at in reversed(rank.samples[:-1]) for x in at.links}
        for link in _links(rank.samples[-1:]):
            peer = owner.get((link.remote, link.local))
            before = early.get((link.local, link.remote))
            is_within_a_host = link.local.rpartition(":")[0] == link.remote.rpartition(":")[0]
            if peer is None or before is None or is_within_a_host:
                continue
            at, first = before
            edge = Edge(
                rank.header.rank,
                peer,
                link.sent_bytes - first.sent_bytes,
                link.busy_s - first.busy_s,
                link.num_resent - first.num_resent,
                link.least_rtt_s,
                link.kind,
                arrivals[link.local, link.remote],
                max(1, rank.samples[-1].step - at.step),
            )
            old = found.get((edge.source, edge.target))
            found[edge.source, edge.target] = edge if old is None else _both(old, edge)
    most = max((edge.sent_bytes for edge in found.values()), default=0)
    return tuple(edge for edge in found.values() if edge.sent_bytes > _LEAST_BYTES * most)


def slow_link(edges: Iterable[Edge]) -> SlowLink | None:
    """Return the host with a slow link, else the connection that loses packets, else the distant host; or None."""
    edges = tuple(edges)
    ranks = {x for edge in edges for x in (edge.source, edge.target)}
    if len(ranks) < 3:
        return None  # both ends claim it, so its owner is unknown
    loses = _lossy(edges)
    if loses is not None and loses.value >= _SLOW_BY_LOSS:
        return loses
    return _slow(edges, ranks) or loses or _far(edges, ranks)


def _slow(edges: tuple[Edge, ...], ranks: set[int]) -> SlowLink | None:
    scores = {rank: fmean(math.log(max(x.bytes_per_s, 1.0)) for x in _at(edges, rank)) for rank in ranks}
    slowest = min(scores, key=scores.__getitem__)
    own = [x.bytes_per_s for x in _at(edges, slowest)]
    elsewhere = [x for x in edges if slowest not in {x.source, x.target}]
    if not elsewhere:
        return None
    others = [x.bytes_per_s for x in elsewhere]
    direction = _direction(edges, slowest)
    if max(own) >= _SLOW * min(others) and not _is_lower(edges, slowest, direction, min(others)):
        return None
    step_bytes = max(x.sent_bytes / x.num_steps for x in _at(edges, slowest))
    return SlowLink(slowest, "rate", median(own), median(others), None, direction, step_bytes)


def _is_lower(edges: tuple[Edge, ...], rank: int, direction: str, others: float) -> bool:
    """Return whether what goes the slow way is slower than the others in the mean as well."""
    ends = {"towards": [x for x in edges if x.target == rank], "from": [x for x in edges if x.source == rank]}
    slow = ends.get(direction, [*ends["towards"], *ends["from"]] if direction else [])
    return bool(slow) and max(x.bytes_per_s for x in slow) < _LOWER * others


def _direction(edges: tuple[Edge, ...], rank: int) -> str:
    """Return which way data arrive more slowly than elsewhere, without breaks; "": neither, or it is not known."""
    elsewhere = max((x.arrival_bytes_per_s for x in edges if rank not in {x.source, x.target}), default=0.0)
    ways = {"towards": [x for x in edges if x.target == rank], "from": [x for x in edges if x.source == rank]}
    slow = []
    for way, found in ways.items():
        rate = max((x.arrival_bytes_per_s for x in found), default=0.0)
        if not rate:
            return ""
        # Where the rate is the mean's, this way is what its sender waits for; else the other way's acknowledgements.
        if rate < _SLOW * elsewhere and rate < _WITHOUT_BREAKS * max(x.bytes_per_s for x in found):
            slow.append(way)
    return "both" if len(slow) == 2 else "".join(slow)


def _lossy(edges: tuple[Edge, ...]) -> SlowLink | None:
    worst = max(edges, key=lambda edge: edge.lost_ratio)
    others = [x.lost_ratio for x in edges if x is not worst and x.source != worst.source]
    if worst.lost_ratio <= _LOSSY or not others or worst.lost_ratio <= _MORE_LOST * max(others):
        return None
    return SlowLink(worst.source, "loss", worst.lost_ratio, max(others), worst.target)


def _far(edges: tuple[Edge, ...], ranks: set[int]) -> SlowLink | None:
    nearest = {rank: min(x.least_rtt_s for x in _at(edges, rank)) for rank in ranks}
    farthest = max(nearest, key=nearest.__getitem__)
    others = [x.least_rtt_s for x in edges if farthest not in {x.source, x.target}]
    if not others or nearest[farthest] < max(_FAR * max(others), _FAR_S):
        return None
    return SlowLink(farthest, "delay", nearest[farthest], max(others))


def _at(edges: tuple[Edge, ...], rank: int) -> list[Edge]:
    return [x for x in edges if rank in {x.source, x.target}]


def _links(samples: Iterable[Sample]) -> list[LinkCounters]:
    return [link for sample in samples for link in sample.links]


def _both(a: Edge, b: Edge) -> Edge:
    return Edge(
        a.source,
        a.target,
        a.sent_bytes + b.sent_bytes,
        a.busy_s + b.busy_s,
        a.num_resent + b.num_resent,
        min(a.least_rtt_s, b.least_rtt_s),
        a.kind,
        max(a.arrival_bytes_per_s, b.arrival_bytes_per_s),
        max(a.num_steps, b.num_steps),
    )
