"""What steps run on: hosts with unequal links, ranks of unequal speed, and what emulating them costs.

Times are seconds, rates bytes a second, in one direction; a link carries both directions at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

from paceline.errors import ConfigurationError
from paceline.schedules.topology import Link, Topology

PACKET_BYTES = 1448  # what a TCP packet of 1,500 bytes carries
SHARED_MEMORY = Link(5e-6, math.inf)


@dataclass(frozen=True)
class HostLink:
    """A host's link to the switch, shared by its ranks.

    Attributes:
        bytes_per_s: Payload that it carries a second, in each direction.
        latency_s: From the start of a round to the arrival of an empty message.
        loss_ratio: Fraction of the packets that the host sends and nobody receives.
        message_s: What each further message of a rank in the same round costs it.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    loss_ratio: float = 0.0
    message_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ConfigurationError(
                f"a link of {self.bytes_per_s} bytes a second carries nothing. Pass a rate above 0, such as 10Gbit."
            )
        if not (0 <= self.latency_s < math.inf and 0 <= self.message_s < math.inf):
            raise ConfigurationError(
                f"a latency of {self.latency_s} s, or {self.message_s} s a message, cannot be. Pass seconds, 0 or more."
            )
        if not 0 <= self.loss_ratio < 1:
            raise ConfigurationError(
                f"a link that loses {self.loss_ratio} of its packets cannot be. Pass a fraction from 0 to below 1."
            )


@dataclass(frozen=True)
class EmulationCost:
    """Processor time that emulated hosts take from each other because they share a machine; a real cluster has none.

    Attributes:
        cores: Of the machine that emulates.
        collective_s: Of one rank, for one collective.
        message_s: Of sending one message and receiving it.
        s_per_byte: Of sending and receiving one byte.
        layer_s: Of one rank, for one layer's forward or backward: sleeping and waking up, and autograd.
    """

    cores: int = 1
    collective_s: float = 0.0
    message_s: float = 0.0
    s_per_byte: float = 0.0
    layer_s: float = 0.0

    def __post_init__(self) -> None:
        costs = (self.collective_s, self.message_s, self.s_per_byte, self.layer_s)
        if self.cores < 1 or not all(0 <= cost < math.inf for cost in costs):
            raise ConfigurationError(f"{self}: at least one core, and no cost below 0")


NO_EMULATION = EmulationCost()


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
        emulation: If it is emulated, what that costs.
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
    emulation: EmulationCost = field(default=NO_EMULATION)

    def __post_init__(self) -> None:
        if not self.ranks_of_host or min(self.ranks_of_host) < 1:
            raise ConfigurationError(
                f"a cluster of hosts with {list(self.ranks_of_host)} ranks cannot be: at least one host, and at "
                "least one rank on each."
            )
        if len(self.links) != len(self.ranks_of_host):
            raise ConfigurationError(
                f"{len(self.links)} links for {len(self.ranks_of_host)} hosts; every host has one."
            )
        if self.speeds and len(self.speeds) != self.num_ranks:
            raise ConfigurationError(
                f"{len(self.speeds)} speeds for {self.num_ranks} ranks; every rank has one."
            )
        if not all(0 < speed < math.inf for speed in self.speeds):
            raise ConfigurationError(f"the slowest rank's speed is {min(self.speeds)}; speeds are above 0.")
        if not 1 <= self.racks <= len(self.ranks_of_host):
            raise ConfigurationError(f"{self.racks} racks for {len(self.ranks_of_host)} hosts cannot be.")
        if not (self.uplink_bytes_per_s > 0 and self.flow_bytes_per_s > 0):
            raise ConfigurationError("an uplink and a connection carry more than 0 bytes a second.")
        if not all(
            0 <= x < math.inf for x in (self.collective_s, self.fold_s_per_byte, self.stall_s, self.probe_s)
        ):
            raise ConfigurationError("what a collective, a fold and a stall cost is 0 s or more.")

    @classmethod
    def of_equal_hosts(
        cls, num_ranks: int, link: HostLink, ranks_per_host: int = 1, within: Link = SHARED_MEMORY
    ) -> Cluster:
        """Hosts that are alike; the last one has fewer ranks where `num_ranks` is no multiple."""
        if num_ranks < 1 or ranks_per_host < 1:
            raise ConfigurationError(
                f"{num_ranks} ranks, {ranks_per_host} a host, cannot be: at least 1 of both."
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
        """Which host each rank is on."""
        return Topology(tuple(chain.from_iterable((host,) * n for host, n in enumerate(self.ranks_of_host))))

    def rack_of(self, host: int) -> int:
        """The rack of a host: the hosts in order, as evenly as it goes."""
        return host * self.racks // self.num_hosts

    def with_links(
        self, *, faster: float = 1.0, latency_ratio: float = 1.0, loss_ratio: float | None = None
    ) -> Cluster:
        """The same with all links (also within hosts, and uplinks) changed by these factors."""
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
        """One line for a report."""
        links = {(link.bytes_per_s, link.latency_s, link.loss_ratio) for link in self.links}
        words = f"{self.topology}, {_link_words(sorted(links))}"
        if len(set(self.speeds)) > 1:
            words += f", speeds {min(self.speeds):g} to {max(self.speeds):g}"
        if self.racks > 1:
            words += f", {self.racks} racks with uplinks of {rate_words(self.uplink_bytes_per_s)}"
        return words + (", with what emulation costs" if self.emulation != NO_EMULATION else "")


def rate_words(bytes_per_s: float) -> str:
    """A rate with its unit."""
    if bytes_per_s == math.inf:
        return "no limit"
    megabits = bytes_per_s / 125_000
    return f"{megabits / 1000:.3g} Gbit/s" if megabits >= 1000 else f"{megabits:.3g} Mbit/s"


def _link_words(links: Sequence[tuple[float, float, float]]) -> str:
    slowest, latency_s, _ = links[0]
    words = rate_words(slowest) + (f" to {rate_words(links[-1][0])}" if len(links) > 1 else "")
    words += f" a host, {max(latency_s, *[x[1] for x in links]) * 1e6:.3g} us a round"
    loss = max(link[2] for link in links)
    return words + (f", losing up to {loss:.2%}" if loss else "")
