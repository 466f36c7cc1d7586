"""The time of a collective on a cluster, and the link that limits it: a fluid model of each round.

In a round, all messages flow at once. Links are a host's link, the links within a host, and a rack's uplink. Each
carries the sum of the messages that cross it, in each direction by itself. A connection carries no more than its own
limit. So

    round = latency + (m - 1) message_s + max over links of (its bytes / its rate) + folding

with m the most messages that one rank sends over such a link. With the same links everywhere that is
`schedules.price`, exactly, as a test asks. Rounds follow each other, and every round ends on all ranks at once. What a
rank that is ahead might gain is not modelled. The ranks of an all-reduce end within a round of each other anyway.

All of it is proportional to the message, so a collective is a line: fixed seconds, and seconds a byte.

Loss: a lost packet that others follow is sent again within a round trip, and costs its bytes. The last one of a message
is missed only by a probe, and the only one by the retransmission timeout. Stalls of a round happen at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from paceline_plan.deployment import PACKET_BYTES, Cluster
from paceline_plan.round_patterns import Pattern, Ratios, candidates, is_possible, patterns


@dataclass(frozen=True)
class CollectiveCost:
    """Seconds of one collective, by where they go.

    Attributes:
        algorithm: Its name.
        rounds: How many follow each other.
        messages: Sent by all ranks together.
        latency_s: Of all rounds.
        link_s_per_byte: The fullest link of each round, for each byte of the message.
        flow_s_per_byte: The same if one connection's limit counts as well; at least `link_s_per_byte`.
        fold_s_per_byte: Adding.
        bottleneck: The link that limits most of it, in words.
        overhead_s: The library's fixed time.
        overhead_s_per_byte: The cluster's overhead for each byte: nothing, unless it is emulated.
        lossy_rounds: How many, messages in each, their part of the whole message, the loss ratio.
    """

    algorithm: str
    rounds: int
    messages: int
    latency_s: float
    link_s_per_byte: float
    flow_s_per_byte: float
    fold_s_per_byte: float
    bottleneck: str
    overhead_s: float = 0.0
    overhead_s_per_byte: float = 0.0
    lossy_rounds: tuple[tuple[int, int, float, float], ...] = ()

    @property
    def fixed_s(self) -> float:
        """Return the seconds that do not depend on the message's size."""
        return self.latency_s + self.overhead_s

    @property
    def s_per_byte(self) -> float:
        """Return the seconds per byte of a message that is alone on the links."""
        return self.flow_s_per_byte + self.fold_s_per_byte + self.overhead_s_per_byte

    def of(self, num_bytes: float) -> float:
        """Return the seconds for a message, without losses at the ends of messages."""
        return self.fixed_s + self.s_per_byte * num_bytes

    def stalls(self) -> float:
        """Return how many rounds are expected to stall."""
        return sum(
            repeat * (1 - (1 - loss_ratio) ** messages)
            for repeat, messages, _, loss_ratio in self.lossy_rounds
        )

    def is_probed(self, num_bytes: float) -> bool:
        """Return whether messages are longer than one packet, so that a probe finds a stall."""
        return all(num_bytes * ratio > PACKET_BYTES for _, _, ratio, _ in self.lossy_rounds)


@lru_cache(maxsize=512)
def collective_cost(cluster: Cluster, algorithm: str) -> CollectiveCost:
    """Return the cost of an all-reduce by one algorithm.

    Raises:
        ConfigurationError: There is no such algorithm, or not for so many ranks.
    """
    ledger = _Ledger(cluster)
    for pattern in patterns(algorithm, cluster.topology):
        ledger.add(pattern)
    return ledger.total(algorithm)


def costs_of(cluster: Cluster, algorithm: str) -> list[CollectiveCost]:
    """Return the costs of one named algorithm, or of all if "auto". Without a hierarchy, a hierarchical one is flat."""
    if algorithm == "auto":
        return [collective_cost(cluster, name) for name in candidates(cluster.topology)]
    flat = algorithm.removeprefix("hierarchical_")
    return [collective_cost(cluster, algorithm if is_possible(algorithm, cluster.topology) else flat)]


class _Ledger:
    """Adds up rounds."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.host = np.array(cluster.topology.host_of_rank)
        self.rack = np.array([cluster.rack_of(host) for host in range(cluster.num_hosts)])
        self.rates = np.array([link.bytes_per_s * (1 - link.loss_ratio) for link in cluster.links])
        self.latencies = np.array([link.latency_s for link in cluster.links])
        self.losses = np.array([link.loss_ratio for link in cluster.links])
        self.rounds = self.messages = 0
        self.latency_s = self.link = self.flow = self.fold = self.bytes_ratio = 0.0
        self.by_link: dict[str, float] = {}
        self.lossy: list[tuple[int, int, float, float]] = []

    def add(self, pattern: Pattern) -> None:
        """Count a pattern's rounds."""
        source, target = self.host[pattern.sources], self.host[pattern.targets]
        crosses = source != target
        slowest, where = self._fullest(pattern, source, target, crosses)
        flow = float(pattern.ratios[crosses].max(initial=0.0)) / self.cluster.flow_bytes_per_s
        repeat = pattern.repeat
        self.rounds += repeat
        self.messages += repeat * len(pattern.sources)
        self.bytes_ratio += repeat * float(pattern.ratios.sum())
        self.latency_s += repeat * self._latency_s(pattern, source, target, crosses)
        self.link += repeat * slowest
        self.flow += repeat * max(slowest, flow)
        self.by_link[where] = self.by_link.get(where, 0.0) + repeat * slowest
        if pattern.folds:
            added = np.bincount(pattern.targets, pattern.ratios).max()
            self.fold += repeat * float(added) * self.cluster.fold_s_per_byte
        self._count_losses(pattern, source[crosses], pattern.ratios[crosses])

    def _fullest(
        self,
        pattern: Pattern,
        source: NDArray[np.int64],
        target: NDArray[np.int64],
        crosses: NDArray[np.bool_],
    ) -> tuple[float, str]:
        """Return the seconds per byte of the fullest link, and which link it is."""
        size, sent = self.cluster.num_hosts, pattern.ratios
        out = np.bincount(source[crosses], sent[crosses], minlength=size)
        into = np.bincount(target[crosses], sent[crosses], minlength=size)
        busy = np.maximum(out, into) / self.rates
        inside = np.bincount(source[~crosses], sent[~crosses], minlength=size)
        found = {
            _words(int(busy.argmax()), self.cluster): float(busy.max()),
            "the links within a host": float(inside.max()) / self.cluster.within.bytes_per_s,
        }
        if self.cluster.racks > 1:
            leaves = self.rack[source] != self.rack[target]
            ends = (self.rack[source[leaves]], self.rack[target[leaves]])
            most = max(
                np.bincount(end, sent[leaves], minlength=self.cluster.racks).max(initial=0.0) for end in ends
            )
            found["a rack's uplink"] = float(most) / self.cluster.uplink_bytes_per_s
        where = max(found, key=lambda name: found[name])
        return found[where], where

    def _latency_s(
        self,
        pattern: Pattern,
        source: NDArray[np.int64],
        target: NDArray[np.int64],
        crosses: NDArray[np.bool_],
    ) -> float:
        latency_s = 0.0
        if crosses.any():
            ends = np.maximum(self.latencies[source[crosses]], self.latencies[target[crosses]])
            count = int(np.bincount(pattern.sources[crosses]).max())
            latency_s = float(ends.max()) + (count - 1) * max(link.message_s for link in self.cluster.links)
        if not crosses.all():
            count = int(np.bincount(pattern.sources[~crosses]).max())
            within = self.cluster.within
            latency_s = max(latency_s, within.latency_s + (count - 1) * within.message_s)
        return latency_s

    def _count_losses(self, pattern: Pattern, source: NDArray[np.int64], sent: Ratios) -> None:
        losses = self.losses[source]
        for loss in np.unique(losses[losses > 0]):
            chosen = losses == loss
            mean = float(sent[chosen].mean())
            self.lossy.append((pattern.repeat, int(chosen.sum()), mean, float(loss)))

    def total(self, algorithm: str) -> CollectiveCost:
        """Return the cost of all rounds together."""
        return CollectiveCost(
            algorithm,
            self.rounds,
            self.messages,
            self.latency_s,
            self.link,
            self.flow,
            self.fold,
            max(self.by_link, key=lambda name: self.by_link[name], default="no link"),
            *self.cluster.overhead_s(self.messages, self.bytes_ratio),
            tuple(self.lossy),
        )


def _words(host: int, cluster: Cluster) -> str:
    slowest = min(link.bytes_per_s for link in cluster.links)
    alike = all(link.bytes_per_s == slowest for link in cluster.links)
    return "the hosts' links" if alike else f"host {host}'s link"
