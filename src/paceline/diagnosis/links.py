"""Which host's link is slow, lossy or far, from what both ends of every connection between ranks have counted.

Rates are acknowledged bytes over the time in which something was not yet acknowledged. Which of a link's two directions
is slow cannot be told from that: acknowledgements wait in the same queue. It is told by how fast data have arrived at
best, at the host and at those that it sends to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, median

from paceline.observe.run_reading import Run
from paceline.observe.run_records import LinkCounters, Sample

_SLOW = 0.7  # the best rate at a slow host over the worst elsewhere, and of arrivals the best over the best
_BOTH = 0.6  # of arrivals, the best in either direction over the best elsewhere
_LOSSY, _MORE_LOST = 0.005, 3.0  # segments resent, and over any other connection's
_FAR, _FAR_S = 3.0, 0.002  # the shortest round trip over the others', and at least
_SEGMENT_BYTES = 1448
_LEAST_BYTES = 0.1  # of the busiest connection: others carry no gradients


@dataclass(frozen=True)
class Edge:
    """What one rank sent to another."""

    source: int  # whose counters they are
    target: int  # who is at the other end
    sent_bytes: int  # acknowledged between the first and the last sample
    busy_s: float  # with something not yet acknowledged
    num_resent: int  # segments
    least_rtt_s: float  # the shortest round trip seen
    kind: str = "tcp"  # "tcp" or "udp"
    peak_bytes_per_s: float = 0.0  # the fastest at which it arrived at the target; 0: not known

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
    best: float = (
        0.0  # with "rate": what others reach at best; in the mean a ring's others wait for the slow one
    )


def edges_of(run: Run) -> tuple[Edge, ...]:
    """Connections between ranks that carried a good part of the gradients, by their two ends' own addresses."""
    owner, peaks = {}, {}
    for rank in run.ranks:
        for link in _links(rank.samples[-1:]):
            owner[link.local, link.remote] = rank.header.rank
            peaks[link.remote, link.local] = link.peak_bytes_per_s  # of what the other end sends
    found: dict[tuple[int, int], Edge] = {}
    for rank in run.ranks:
        early = {(x.local, x.remote): x for x in _first_links(rank.samples)}
        for link in _links(rank.samples[-1:]):
            peer = owner.get((link.remote, link.local))
            before = early.get((link.local, link.remote))
            if peer is None or before is None or _is_within_a_host(link):
                continue
            edge = _since(rank.header.rank, peer, before, link, peaks[link.local, link.remote])
            old = found.get((edge.source, edge.target))
            found[edge.source, edge.target] = edge if old is None else _both(old, edge)
    most = max((edge.sent_bytes for edge in found.values()), default=0)
    return tuple(edge for edge in found.values() if edge.sent_bytes > _LEAST_BYTES * most)


def slow_link(edges: Iterable[Edge]) -> SlowLink | None:
    """The host whose link is slow, else the connection that loses, else the host that is far; None: none stands out."""
    edges = tuple(edges)
    ranks = {x for edge in edges for x in (edge.source, edge.target)}
    if len(ranks) < 3:
        return None  # of two ends, nobody can say whose it is
    return _slow(edges, ranks) or _lossy(edges) or _far(edges, ranks)


def _slow(edges: tuple[Edge, ...], ranks: set[int]) -> SlowLink | None:
    scores = {rank: fmean(math.log(max(x.bytes_per_s, 1.0)) for x in _at(edges, rank)) for rank in ranks}
    slowest = min(scores, key=scores.__getitem__)
    own = [x.bytes_per_s for x in _at(edges, slowest)]
    others = [x.bytes_per_s for x in edges if slowest not in {x.source, x.target}]
    if not others or max(own) >= _SLOW * min(others):
        return None
    best = max(median(others), *(x.peak_bytes_per_s for x in edges if slowest not in {x.source, x.target}))
    direction = _direction(edges, slowest)
    return SlowLink(slowest, "rate", median(own), median(others), direction=direction, best=best)


def _direction(edges: tuple[Edge, ...], rank: int) -> str:
    """What is slow is so at its best, too; the other direction has bursts as fast as elsewhere."""

    def peak(found: Iterable[Edge]) -> float:
        return max((x.peak_bytes_per_s for x in found), default=0.0)

    towards = peak(x for x in edges if x.target == rank)
    away = peak(x for x in edges if x.source == rank)
    elsewhere = peak(x for x in edges if rank not in {x.source, x.target})
    if not towards or not away:
        return ""
    if max(towards, away) < _BOTH * elsewhere:
        return "both"
    if towards < _SLOW * away:
        return "towards"
    return "from" if away < _SLOW * towards else ""


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


def _first_links(samples: list[Sample]) -> list[LinkCounters]:
    """Each connection as it was first seen."""
    found: Mapping[tuple[str, str], LinkCounters] = {
        (link.local, link.remote): link for link in reversed(_links(samples[:-1]))
    }
    return list(found.values())


def _since(
    source: int, target: int, before: LinkCounters, now: LinkCounters, peak_bytes_per_s: float
) -> Edge:
    return Edge(
        source,
        target,
        now.sent_bytes - before.sent_bytes,
        now.busy_s - before.busy_s,
        now.num_resent - before.num_resent,
        now.least_rtt_s,
        now.kind,
        peak_bytes_per_s,
    )


def _is_within_a_host(link: LinkCounters) -> bool:
    """No link carries it, whichever ranks they are."""
    return link.local.rpartition(":")[0] == link.remote.rpartition(":")[0]


def _both(a: Edge, b: Edge) -> Edge:
    """Several connections between the same ranks."""
    return Edge(
        a.source,
        a.target,
        a.sent_bytes + b.sent_bytes,
        a.busy_s + b.busy_s,
        a.num_resent + b.num_resent,
        min(a.least_rtt_s, b.least_rtt_s),
        a.kind,
        max(a.peak_bytes_per_s, b.peak_bytes_per_s),
    )
