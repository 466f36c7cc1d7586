"""The deployment of a training: hosts, links and parameter servers, with the buckets and the algorithm in use.

Times are seconds, rates bytes a second, in one direction; a link carries both directions at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from paceline.errors import ConfigurationError
from paceline.planning.bucket_assignment import DEFAULT_BUCKET_CAP_MB, DEFAULT_FIRST_BUCKET_BYTES, MEBIBYTE
from paceline.planning.replay import AlphaBetaCost, Wire, in_one_lane
from paceline.quantities import show_rate
from paceline.schedules.topology import Link, Topology

PACKET_BYTES = 1448  # what a TCP packet of 1,500 bytes carries
SHARED_MEMORY = Link(5e-6, math.inf)
DEFAULT_CAPS_BYTES = (DEFAULT_FIRST_BUCKET_BYTES, DEFAULT_BUCKET_CAP_MB * MEBIBYTE)
NO_TIME = AlphaBetaCost(0.0, 0.0)


@dataclass(frozen=True)
class HostLink:
    """A host's link to the switch, shared by its ranks.

    Attributes:
        bytes_per_s: Payload that it carries a second, in each direction.
        latency_s: From the start of a round to the arrival of an empty message.
        loss_ratio: Fraction of the packets from the host that are lost.
        message_s: What each further message of a rank in the same round costs it.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    loss_ratio: float = 0.0
    message_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ConfigurationError(
                f"a link of {self.bytes_per_s} bytes per second carries nothing. Pass a rate above 0, such as 10Gbit."
            )
        if not (0 <= self.latency_s < math.inf and 0 <= self.message_s < math.inf):
            raise ConfigurationError(
                f"a latency of {self.latency_s} s, or {self.message_s} s per message, is not possible. "
                "Pass seconds, 0 or more."
            )
        if not 0 <= self.loss_ratio < 1:
            raise ConfigurationError(
                f"a link that loses {self.loss_ratio} of its packets is not possible. Pass 0 to below 1."
            )


@dataclass(frozen=True)
class Cluster:
    """Hosts, their links, and their ranks.

    Attributes:
        ranks_of_host: How many ranks each host has; ranks are numbered host by host.
        links: One a host.
        within: Between ranks of a host: all of them together.
        speeds: One a rank: 1 computes as fast as where the workload was recorded, 0.5 half as fast. Empty: all 1.
        racks: Into how many racks the hosts are divided, in order.
        uplink_bytes_per_s: What a rack exchanges with the others, in each direction.
        flow_bytes_per_s: The most that one connection carries.
        collective_s: What a collective costs however short: the library, a kernel's launch.
        fold_s_per_byte: Of adding what arrived.
        stall_s: What the loss of a message of one packet costs: TCP's smallest retransmission timeout.
        probe_s: What the loss of a longer message's last packet costs: TCP's tail loss probe.
    """

    ranks_of_host: tuple[int, ...]
    links: tuple[HostLink, ...]
    within: Link = SHARED_MEMORY
    speeds: tuple[float, ...] = ()
    racks: int = 1
    uplink_bytes_per_s: float = math.inf
    flow_bytes_per_s: float = math.inf
    collective_s: float = 0.0
    fold_s_per_byte: float = 0.0
    stall_s: float = 0.2
    probe_s: float = 0.01

    def __post_init__(self) -> None:
        if not self.ranks_of_host or min(self.ranks_of_host) < 1:
            raise ConfigurationError(
                f"a cluster of hosts with {list(self.ranks_of_host)} ranks is not possible: at least one host, and at "
                "least one rank on each."
            )
        if len(self.links) != len(self.ranks_of_host):
            raise ConfigurationError(
                f"{len(self.links)} links for {len(self.ranks_of_host)} hosts. Pass one per host."
            )
        if self.speeds and len(self.speeds) != self.num_ranks:
            raise ConfigurationError(
                f"{len(self.speeds)} speeds for {self.num_ranks} ranks. Pass one per rank."
            )
        if not all(0 < speed < math.inf for speed in self.speeds):
            raise ConfigurationError(
                f"the slowest rank's speed is {min(self.speeds)}. Speeds must be above 0."
            )
        if not 1 <= self.racks <= len(self.ranks_of_host):
            raise ConfigurationError(
                f"{self.racks} racks for {len(self.ranks_of_host)} hosts; pass 1 to as many as hosts."
            )
        if not (self.uplink_bytes_per_s > 0 and self.flow_bytes_per_s > 0):
            raise ConfigurationError("an uplink and a connection carry more than 0 bytes per second.")
        if not all(
            0 <= x < math.inf for x in (self.collective_s, self.fold_s_per_byte, self.stall_s, self.probe_s)
        ):
            raise ConfigurationError("what a collective, a fold and a stall cost is 0 s or more.")

    @classmethod
    def of_equal_hosts(
        cls, num_ranks: int, link: HostLink, ranks_per_host: int = 1, within: Link = SHARED_MEMORY
    ) -> Cluster:
        """Make a cluster of equal hosts. The last one has fewer ranks if `num_ranks` is not a multiple."""
        if num_ranks < 1 or ranks_per_host < 1:
            raise ConfigurationError(
                f"{num_ranks} ranks with {ranks_per_host} per host: both must be at least 1."
            )
        full, rest = divmod(num_ranks, ranks_per_host)
        hosts = (ranks_per_host,) * full + ((rest,) if rest else ())
        return cls(hosts, (link,) * len(hosts), within)

    @cached_property
    def num_ranks(self) -> int:
        return sum(self.ranks_of_host)

    @property
    def num_hosts(self) -> int:
        return len(self.ranks_of_host)

    @cached_property
    def topology(self) -> Topology:
        """Return which host each rank is on."""
        return Topology(tuple(chain.from_iterable((host,) * n for host, n in enumerate(self.ranks_of_host))))

    def overhead_s(self, messages: int, bytes_ratio: float) -> tuple[float, float]:
        """Return the seconds per collective and per byte that are neither latency, link nor adding.

        Args:
            messages: Of all ranks.
            bytes_ratio: What all of them carry, of the message that is reduced.
        """
        return self.collective_s, 0.0

    def layer_overhead_s(self) -> float:
        """Return the seconds that a layer's forward or backward takes in addition to the recorded time."""
        return 0.0

    def rack_of(self, host: int) -> int:
        """Return the rack of a host. Racks hold consecutive hosts, in numbers as equal as possible."""
        return host * self.racks // self.num_hosts

    def with_links(
        self, *, faster: float = 1.0, latency_ratio: float = 1.0, loss_ratio: float | None = None
    ) -> Cluster:
        """Return this cluster with all links (also within hosts, and uplinks) changed by these factors."""
        links = tuple(
            HostLink(
                link.bytes_per_s * faster,
                link.latency_s * latency_ratio,
                link.loss_ratio if loss_ratio is None else loss_ratio,
                link.message_s * latency_ratio,
            )
            for link in self.links
        )
        within = Link(
            self.within.latency_s * latency_ratio, self.within.bytes_per_s * faster, self.within.message_s
        )
        return replace(
            self,
            links=links,
            within=within,
            uplink_bytes_per_s=self.uplink_bytes_per_s * faster,
            flow_bytes_per_s=self.flow_bytes_per_s * faster,
            collective_s=self.collective_s * latency_ratio,
        )

    def describe(self) -> str:
        """Return one line for a report."""
        links = {(link.bytes_per_s, link.latency_s, link.loss_ratio) for link in self.links}
        words = f"{self.topology}, {_link_words(sorted(links))}"
        if len(set(self.speeds)) > 1:
            words += f", speeds {min(self.speeds):g} to {max(self.speeds):g}"
        if self.racks > 1:
            words += (
                f", {self.racks} racks with uplinks of {show_rate(8 * self.uplink_bytes_per_s, digits=3)}"
            )
        return words


def _link_words(links: Sequence[tuple[float, float, float]]) -> str:
    slowest, latency_s, _ = links[0]
    words = show_rate(8 * slowest, digits=3) + (
        f" to {show_rate(8 * links[-1][0], digits=3)}" if len(links) > 1 else ""
    )
    words += f" a host, {max(latency_s, *[x[1] for x in links]) * 1e6:.3g} us a round"
    loss = max(link[2] for link in links)
    return words + (f", losing up to {loss:.2%}" if loss else "")


@dataclass(frozen=True)
class Servers:
    """Parameter servers on hosts of their own.

    Attributes:
        number: How many; gradients are cut so that each has the same bytes.
        bytes_per_s: Rate of each server's link.
        duplex: Whether it sends and receives at once. Lemma 3.2's do not.
        piece_bytes: At most so much is pushed to a server before it may be pulled.
        two_way_ratio: What a link that several connections share carries of its rate in each direction while both are
            in use; measured with TCP (`paceline study parameter-servers`).
    """

    number: int
    bytes_per_s: float
    duplex: bool = True
    piece_bytes: float = 1 << 20
    two_way_ratio: float = 0.8

    def __post_init__(self) -> None:
        if self.number < 1 or not (self.bytes_per_s > 0 and self.piece_bytes > 0):
            raise ConfigurationError(
                f"{self.number} parameter servers of {self.bytes_per_s} bytes per second, with pieces of "
                f"{self.piece_bytes} bytes, are not possible. Give at least one server, and a rate and a size above 0."
            )

    def two_way_ratio_on(self, cluster: Cluster) -> float:
        """Return the ratio of the link that limits pushes and pulls: 1 if it carries a single connection."""
        served_s, worker_s = self.s_per_byte(cluster)
        connections = cluster.num_ranks if served_s >= worker_s else self.number * max(cluster.ranks_of_host)
        return self.two_way_ratio if connections > 1 else 1.0

    def num_pieces(self, num_bytes: float) -> int:
        """Return the number of pieces of a bucket for each server."""
        return max(1, math.ceil(num_bytes / (self.number * self.piece_bytes)))

    def s_per_byte(self, cluster: Cluster) -> tuple[float, float]:
        """Return the time per byte of pushing all gradients: on the servers' links, and on the fullest worker's."""
        workers = max(
            ranks / link.bytes_per_s for ranks, link in zip(cluster.ranks_of_host, cluster.links, strict=True)
        )
        return cluster.num_ranks / (self.number * self.bytes_per_s), workers


@dataclass(frozen=True)
class ReductionPlan:
    """The way in which gradients are reduced.

    Attributes:
        caps_bytes: How many bytes close the first bucket, the second, ...; the last repeats. A bucket is closed by the
            gradient that brings it to its cap. Infinity: one bucket, when backward is done.
        algorithm: Name of the all-reduce, one of `round_patterns.ALL_REDUCES`; "auto": for each bucket the fastest.
        payload_ratio: Bytes on the wire over bytes of gradients: 0.5 in 16 bits.
        launch: On the thread that computes, for each bucket.
        finish: After a bucket has arrived, on the thread that waits.
        sync_every: Micro-steps per step; the last one synchronizes.
        shares: Each rank's part of the global batch; empty: equal ones.
        servers: Parameter servers instead of an all-reduce.
        priority: Pieces of buckets go in the order of `planning.forward_overlap`, and the next forward hides them, too.
        overlap: Whether buckets leave during backward; False: all when it is done.
    """

    caps_bytes: tuple[float, ...] = DEFAULT_CAPS_BYTES
    algorithm: str = "auto"
    payload_ratio: float = 1.0
    launch: AlphaBetaCost = NO_TIME
    finish: AlphaBetaCost = NO_TIME
    sync_every: int = 1
    shares: tuple[float, ...] = ()
    servers: Servers | None = None
    priority: bool = False
    overlap: bool = True

    def __post_init__(self) -> None:
        if not self.caps_bytes or not all(cap >= 0 for cap in self.caps_bytes):
            raise ConfigurationError(f"bucket caps of {list(self.caps_bytes)} bytes must be 0 or more.")
        if not 0 < self.payload_ratio <= 4:
            raise ConfigurationError(
                f"a payload of {self.payload_ratio} of the gradients' bytes must be above 0 and at most 4."
            )
        if self.sync_every < 1:
            raise ConfigurationError(
                f"synchronizing every {self.sync_every} micro-steps: the number must be 1 or more."
            )
        if self.shares and (min(self.shares) < 0 or not math.isclose(sum(self.shares), 1, rel_tol=1e-6)):
            raise ConfigurationError(
                f"shares of a batch add up to 1, not to {sum(self.shares):g}; none is below 0."
            )
        if self.priority and (self.servers or self.sync_every > 1):
            raise ConfigurationError(
                "priorities are modelled for an all-reduce in every step: drop one of the others."
            )

    def arrivals_s(self, starts_s: Sequence[float], wires: Sequence[Wire]) -> list[float]:
        """Return when collectives end that start at these times: one process group performs them in turn."""
        return in_one_lane(starts_s, wires)

    def describe(self) -> str:
        """Some words for a table."""
        last = self.caps_bytes[-1]
        words = ["one bucket" if last == math.inf else f"buckets of {last / MEBIBYTE:.3g} MiB"]
        words.append(self.algorithm if self.servers is None else f"{self.servers.number} parameter servers")
        if self.payload_ratio != 1:
            words.append(f"{self.payload_ratio:g} of the bytes")
        if self.sync_every > 1:
            words.append(f"synchronizing every {self.sync_every} micro-steps")
        if self.priority:
            words.append("front layers first")
        return ", ".join(words)
