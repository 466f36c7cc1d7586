"""`LeafSpine`: the properties of a simulated network, as a checked record; pure.

    host -- leaf -- spine -- leaf -- host

Rules
1. A port has a queue a band and serves them strictly, the first band first. A packet that does not fit into its band's
   queue is dropped; one that says it is ECN-capable is marked where the port holds more than `mark_bytes`, one that is
   not is dropped where it holds more than `drop_bytes`. It is the port of an emulated cluster, but for that one's drop
   threshold a class.
2. A packet crosses one spine, the same for all of a flow, or any of them (spraying): whoever sends it says which.
3. What is lost at random is lost on a link, behind the port that sends into it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.errors import ConfigurationError

BANDS = 8
HOST_QUEUE_BYTES = 1 << 20


@dataclass(frozen=True)
class Port:
    """What sends into one link; the fields are those of `LeafSpine`."""

    rate_bits_per_s: float
    queue_bytes: int
    mark_bytes: int | None
    drop_bytes: int | None
    way_us: float
    loss_ratio: float


@dataclass(frozen=True)
class LeafSpine:
    """Hosts in racks, each with a leaf switch; every leaf is linked to every spine. One rack has no spines.

    Attributes:
        hosts: How many.
        racks: Into how many racks they are divided, as evenly as it goes.
        spines: How many ways lead from one rack to another.
        rate_bits_per_s: Of each host's link, either way.
        uplink_bits_per_s: Of each link between a leaf and a spine.
        queue_bytes: What a switch's port holds in a band.
        mark_bytes: Above this many bytes in a port, ECN-capable packets are marked; None: never.
        drop_bytes: Above this many, those that are not are dropped; None: never.
        way_us: From one end of a link to the other.
        loss_ratio: Of the packets that hosts send.
        gray_loss_ratio: Of the packets that cross the link from the first leaf to the first spine.
        slow_uplink_ratio: The rate of that link, as a part of the others'.
        most_packets: Under way at once.
    """

    hosts: int
    racks: int = 1
    spines: int = 0
    rate_bits_per_s: float = 1e9
    uplink_bits_per_s: float = 1e9
    queue_bytes: int = 256 * 1024
    mark_bytes: int | None = None
    drop_bytes: int | None = None
    way_us: float = 5.0
    loss_ratio: float = 0.0
    gray_loss_ratio: float = 0.0
    slow_uplink_ratio: float = 1.0
    most_packets: int = 1 << 15

    def __post_init__(self) -> None:
        if self.hosts < 2 or not 1 <= self.racks <= self.hosts:
            raise ConfigurationError(f"{self.hosts} hosts in {self.racks} racks cannot be; at least 2 in 1.")
        if (self.racks > 1) != (self.spines > 0):
            raise ConfigurationError(
                f"{self.racks} racks and {self.spines} spines do not fit: several racks need at least one, "
                "one rack none."
            )
        for name in (
            "rate_bits_per_s",
            "uplink_bits_per_s",
            "queue_bytes",
            "slow_uplink_ratio",
            "most_packets",
        ):
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"{name}={getattr(self, name)} must be more than 0.")
        for name in ("loss_ratio", "gray_loss_ratio"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigurationError(f"{name}={getattr(self, name)} must be at least 0 and less than 1.")

    def rack_of(self, host: int) -> int:
        """The rack that a host stands in."""
        return host * self.racks // self.hosts

    @property
    def num_ports(self) -> int:
        return 2 * self.hosts + 2 * self.racks * self.spines

    def ports(self) -> Iterator[Port]:
        """All ports: hosts', leaves' towards hosts, leaves' towards spines, spines' towards leaves."""
        for _ in range(self.hosts):
            yield Port(self.rate_bits_per_s, HOST_QUEUE_BYTES, None, None, self.way_us, self.loss_ratio)
        for _ in range(self.hosts):
            yield self._switch_port(self.rate_bits_per_s, 0.0)
        for rack in range(self.racks):
            for spine in range(self.spines):
                is_odd = rack == 0 and spine == 0
                rate = self.uplink_bits_per_s * (self.slow_uplink_ratio if is_odd else 1.0)
                yield self._switch_port(rate, self.gray_loss_ratio if is_odd else 0.0)
        for _ in range(self.racks * self.spines):
            yield self._switch_port(self.uplink_bits_per_s, 0.0)

    def _switch_port(self, rate: float, loss: float) -> Port:
        return Port(rate, self.queue_bytes, self.mark_bytes, self.drop_bytes, self.way_us, loss)
