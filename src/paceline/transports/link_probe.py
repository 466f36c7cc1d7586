"""Measures latency and bandwidth of a transport's links: once, by all ranks together, in a fraction of a second.

All ranks send at once, as in a collective. So a link is measured as its ranks share it, with the processor time that
messages cost where ranks share cores. Every rank gets the same answer, so that all choose the same.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.schedules import Link, Links, Topology
from paceline.transports.transport import Transport

ENVIRONMENT = "PACELINE_LINKS"
"""Overrides the probe; rank 0's value counts. See `Links.parse`."""

_SMALL_BYTES = 8
_NUM_SMALL = 15
_NUM_TOGETHER = 5
_SIZES_BYTES = (1 << 16, 1 << 18, 1 << 20, 1 << 22)
_NUM_LARGE = 3
_LONG_ENOUGH_S = 0.01
_FOLD_BYTES = 1 << 20


def find_links(transport: Transport, topology: Topology, timeout_s: float) -> Links:
    """Return the links of rank 0's environment, or else measure those between `topology`'s ranks; the same on all.

    Collective; blocks, usually below 0.3 s. ConfigurationError, on rank 0, for a value that can't be read; the others
    time out. PeerLostError if a rank did not take part.
    """
    text = os.environ.get(ENVIRONMENT) if transport.rank == 0 else None
    given = [1.0, *Links.parse(text).to_numbers()] if text else [0.0] * 8
    agreed = _from_rank_0(transport, given, timeout_s)
    if agreed[0]:
        return Links.from_numbers(agreed[1:])
    return probe(transport, topology, timeout_s)


def probe(
    transport: Transport, topology: Topology, timeout_s: float, long_enough_s: float = _LONG_ENOUGH_S
) -> Links:
    """Measure the links, as `find_links`, by messages up to the first that takes `long_enough_s`, or 4 MiB."""
    hosts = topology.ranks_of_host
    host = topology.host_of_rank[transport.rank]
    mine = hosts[host]
    index = mine.index(transport.rank)
    largest, smallest = max(map(len, hosts)), min(map(len, hosts))
    within = between = None
    if largest > 1:
        neighbours = (mine[(index + 1) % len(mine)], mine[index - 1]) if len(mine) > 1 else None
        within = _Measurement(transport, neighbours, largest, timeout_s, long_enough_s).link()
    if len(hosts) > 1:
        following, preceding = hosts[(host + 1) % len(hosts)], hosts[host - 1]
        neighbours = (following[index], preceding[index]) if index < smallest else None
        between = _Measurement(transport, neighbours, smallest, timeout_s, long_enough_s).link()
    (fold_s_per_byte,) = _median_over_ranks(transport, [_fold_s_per_byte()], timeout_s)
    # A kind of link that does not exist here is never priced.
    return Links(within or between or _NOWHERE, between or within or _NOWHERE, fold_s_per_byte)


_NOWHERE = Link(0.0, 1.0)


@dataclass
class _Measurement:
    """One kind of link: every rank sends to its successor and receives from its predecessor, or does neither."""

    transport: Transport
    neighbours: tuple[int, int] | None  # successor and predecessor
    num_sharing: int  # ranks of a host that send at once
    timeout_s: float
    long_enough_s: float

    def link(self) -> Link:
        one = torch.zeros(_SMALL_BYTES, dtype=torch.uint8)
        self._exchange([one])  # connections are made at the first message
        several = [one.clone() for _ in range(_NUM_TOGETHER)]
        mine = [self._median_s([one], _NUM_SMALL), self._median_s(several, _NUM_SMALL)]
        alone_s, together_s = _median_over_ranks(self.transport, mine, self.timeout_s)
        rate = 0.0
        for size in _SIZES_BYTES:
            large = torch.zeros(size, dtype=torch.uint8)
            self._exchange([large])  # TCP's window grows with what it has carried
            mine = [self._median_s([large], _NUM_LARGE)]
            (large_s,) = _median_over_ranks(self.transport, mine, self.timeout_s)
            rate = size * self.num_sharing / max(large_s - alone_s, 1e-9)
            if large_s - alone_s > self.long_enough_s:
                break
        return Link(alone_s, rate, max(together_s - alone_s, 0.0) / (_NUM_TOGETHER - 1))

    def _median_s(self, messages: list[Tensor], times: int) -> float:
        if self.neighbours is None:
            return float("nan")
        received = [torch.empty_like(message) for message in messages]
        return _median_s(lambda: self._exchange(messages, received), times)

    def _exchange(self, messages: list[Tensor], received: list[Tensor] | None = None) -> None:
        if self.neighbours is None:
            return
        into = received or [torch.empty_like(message) for message in messages]
        successor, predecessor = self.neighbours
        sends = [(successor, message) for message in messages]
        self.transport.exchange(sends, [(predecessor, tensor) for tensor in into], self.timeout_s)


def _median_s(function: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _fold_s_per_byte() -> float:
    one, other = torch.zeros(2, _FOLD_BYTES // 4)
    return _median_s(lambda: torch.add(one, other, out=one), _NUM_SMALL) / _FOLD_BYTES


def _median_over_ranks(transport: Transport, numbers: list[float], timeout_s: float) -> list[float]:
    """Return each number's median over the ranks that have one; the same on every rank."""
    mine = torch.tensor(numbers, dtype=torch.float64)
    others = range(1, transport.num_ranks)
    if transport.rank:
        transport.exchange([(0, mine)], [], timeout_s)
        return _from_rank_0(transport, numbers, timeout_s)
    received = [torch.empty_like(mine) for _ in others]
    if received:
        transport.exchange([], list(zip(others, received, strict=True)), timeout_s)
    return _from_rank_0(transport, torch.stack([mine, *received]).nanmedian(0).values.tolist(), timeout_s)


def _from_rank_0(transport: Transport, numbers: list[float], timeout_s: float) -> list[float]:
    message = torch.tensor(numbers, dtype=torch.float64)
    if transport.rank:
        transport.exchange([], [(0, message)], timeout_s)
    elif transport.num_ranks > 1:
        transport.exchange([(peer, message) for peer in range(1, transport.num_ranks)], [], timeout_s)
    return [float(number) for number in message]
