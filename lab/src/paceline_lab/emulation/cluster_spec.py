"""`ClusterSpec`: the properties of an emulated cluster, as a checked record; pure.

Rules
1. Nothing is created from a spec that cannot be: every mistake raises `ConfigurationError` here.
2. `ClusterSpec.parse` takes what the command line takes, so both have one set of names and one set of errors.
3. What is a property of a host (its ranks, rate, loss, CPU) has one value a host; the rest is one value a cluster.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from paceline import quantities as q
from paceline.errors import ConfigurationError
from paceline_lab.emulation import quantities as sizes

MAX_HOSTS = 200
MAX_LINKS = 8
_CLASSES = 8
DEFAULT_QUEUE_BYTES = 256 * 1024
_SLOWEST, _FASTEST = 64e3, 100e9
_CHEAP = 200e6
_SMALLEST_MTU, _LARGEST_MTU = 576, 9000
_LARGEST_QUEUE = 2**32 - 1  # of the kernel's token bucket
_SUPER_PACKET = 65536 + 128  # what segmentation offload hands to a queue at once
ETHERNET_HEADER = 14


@dataclass(frozen=True)
class ClusterSpec:
    """An emulated cluster: hosts, their links, the switch between them.

    Attributes:
        hosts: Number of hosts, each a network namespace with an address of its own.
        ranks_per_host: How many ranks a host's agent starts, one a host; 1 if not given.
        rate_bits_per_s: Bits per second, one a host, of the host's link as it sends; None does not limit it.
        port_rate_bits_per_s: The same of the switch's port towards the host.
        loss_ratio: Fraction of the packets a host sends that the switch loses, one a host.
        queue_bytes: Bytes that a switch port holds before it drops what arrives.
        cores: Cores a host may use (0.5 is half of one), one a host; None does not limit it.
        delay_s: One-way delay in seconds that every packet between two hosts meets.
        jitter_s: Largest deviation from `delay`, uniformly distributed; packets keep their order.
        mtu: Largest IP packet in bytes.
        offload: Whether segmentation offload crosses the links: one "packet" is then up to 64 KiB, and costs the
            processor a fraction. Off, every packet on a link is at most `mtu` bytes, as on a wire. None, off where
            single packets matter (loss, marks, priority) or cost little (up to 200 Mbit/s), becomes one of the two.
        congestion_control: TCP's, of every connection between hosts.
        min_rto_s: TCP's smallest retransmission timeout in seconds; None leaves the kernel's 200 ms.
        priority: Whether switch ports serve packets by DSCP class selector, strictly.
        mark_bytes: Backlog in bytes above which a port marks ECN-capable packets; None never marks.
        drop_bytes: Backlog in bytes above which a port drops packets that are not ECN-capable; None never does; eight
            values for the class selectors 0 to 7.
        racks: Into how many racks the hosts are divided; 1 is a single switch.
        uplink_bits_per_s: Bits per second between a rack's switch and the spine; None does not limit it.
        links: Links per host, each to a switch of its own; flows are spread over them.
    """

    hosts: int
    ranks_per_host: tuple[int, ...] = ()
    rate_bits_per_s: tuple[float | None, ...] = ()
    port_rate_bits_per_s: tuple[float | None, ...] = ()
    loss_ratio: tuple[float, ...] = ()
    queue_bytes: int = DEFAULT_QUEUE_BYTES
    cores: tuple[float | None, ...] = ()
    delay_s: float = 0.0
    jitter_s: float = 0.0
    mtu: int = 1500
    offload: bool | None = None
    congestion_control: str = "cubic"
    min_rto_s: float | None = None
    priority: bool = False
    mark_bytes: int | None = None
    drop_bytes: int | tuple[int, ...] | None = None
    racks: int = 1
    uplink_bits_per_s: float | None = None
    links: int = 1

    def __post_init__(self) -> None:
        _whole(self.hosts, "hosts", 1, MAX_HOSTS, "a cluster has at least one host")
        defaults: dict[str, float | None] = {
            "ranks_per_host": 1,
            "rate_bits_per_s": None,
            "port_rate_bits_per_s": None,
            "loss_ratio": 0.0,
            "cores": None,
        }
        for name, default in defaults.items():
            if not getattr(self, name):
                same_as_rate = name == "port_rate_bits_per_s" and self.rate_bits_per_s
                object.__setattr__(self, name, same_as_rate or (default,) * self.hosts)
        self._check_lengths()
        self._check_values()
        if self.offload is None:
            object.__setattr__(self, "offload", not self._packets_matter())
        self._check_together()

    @classmethod
    def parse(
        cls,
        *,
        hosts: int,
        ranks_per_host: int | str = 1,
        rate: str | None = None,
        port_rate: str | None = None,
        loss: str | None = None,
        queue: str | None = None,
        cpu: str | None = None,
        delay: str | None = None,
        jitter: str | None = None,
        mtu: int = 1500,
        offload: bool | None = None,
        congestion_control: str = "cubic",
        min_rto: str | None = None,
        priority: bool = False,
        mark: str | None = None,
        drop: str | None = None,
        racks: int = 1,
        uplink: str | None = None,
        links: int = 1,
    ) -> ClusterSpec:
        """Make a spec of the command line's options.

        Raises:
            ConfigurationError: Names the option, what was given, the rule and an example.
        """
        _whole(hosts, "hosts", 1, MAX_HOSTS, "a cluster has at least one host")

        ranks = "--ranks-per-host"

        def each(text: str | None, option: str) -> list[str]:
            return [] if text is None else sizes.per_host(text, hosts, option)

        return cls(
            hosts=hosts,
            ranks_per_host=tuple(sizes.whole(value, ranks) for value in each(str(ranks_per_host), ranks)),
            rate_bits_per_s=tuple(q.rate(value, "--rate") for value in each(rate, "--rate")),
            port_rate_bits_per_s=tuple(
                q.rate(value, "--port-rate") for value in each(port_rate, "--port-rate")
            ),
            loss_ratio=tuple(q.percentage(value, "--loss") for value in each(loss, "--loss")),
            queue_bytes=DEFAULT_QUEUE_BYTES if queue is None else sizes.size(queue, "--queue"),
            cores=tuple(q.cores(value, "--cpu") for value in each(cpu, "--cpu")),
            delay_s=0.0 if delay is None else q.seconds(delay, "--delay"),
            jitter_s=0.0 if jitter is None else q.seconds(jitter, "--jitter"),
            mtu=mtu,
            offload=offload,
            congestion_control=congestion_control,
            min_rto_s=None if min_rto is None else q.seconds(min_rto, "--min-rto"),
            priority=priority,
            mark_bytes=None if mark is None else sizes.size(mark, "--mark"),
            drop_bytes=_thresholds(drop),
            racks=racks,
            uplink_bits_per_s=None if uplink is None else q.rate(uplink, "--uplink"),
            links=links,
        )

    @classmethod
    def from_json(cls, text: str) -> ClusterSpec:
        """The spec that `to_json` wrote."""
        loaded: dict[str, Any] = json.loads(text)
        fields: dict[str, Any] = {}
        for name, value in loaded.items():
            fields[name] = tuple(value) if isinstance(value, list) else value
        return cls(**fields)

    def to_json(self) -> str:
        """All fields, on one line."""
        return json.dumps(asdict(self))

    def drop_limits(self) -> tuple[int, ...] | None:
        """`drop_bytes`, of each class selector; None if nothing is dropped for it."""
        if self.drop_bytes is None or isinstance(self.drop_bytes, tuple):
            return self.drop_bytes
        return (self.drop_bytes,) * _CLASSES

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole cluster."""
        return sum(self.ranks_per_host)

    @property
    def shape(self) -> str:
        """Hosts and ranks in short: `4x2` is four hosts of two ranks, `4+2+1` three hosts of as many as it says."""
        if len(set(self.ranks_per_host)) == 1:
            return f"{self.hosts}x{self.ranks_per_host[0]}"
        return "+".join(map(str, self.ranks_per_host))

    @property
    def interface(self) -> str:
        """The interface that carries a host's address; the same name on every host."""
        return "eth0" if self.links == 1 else "multi0"

    def rack_of(self, host: int) -> int:
        """The rack that a host stands in: the hosts in order, as evenly as it goes."""
        return host * self.racks // self.hosts

    def describe(self) -> list[tuple[str, str]]:
        """Pairs of a property and its value, for a report; every setting that shapes a measurement."""
        rows = [
            ("hosts x ranks", self.shape.replace("x", " x ").replace("+", " + ")),
            ("rate", _each(self.rate_bits_per_s, q.show_rate, "not limited")),
            ("queue of a switch port", sizes.show_size(self.queue_bytes)),
            ("loss", _each(self.loss_ratio, sizes.show_percentage, "")),
            ("delay, one way", _show_delay(self.delay_s, self.jitter_s)),
            ("cores a host", _each(self.cores, lambda cores: f"{cores:g}", "not limited")),
            ("MTU", f"{self.mtu} B, segmentation offload {'on' if self.offload else 'off'}"),
            ("TCP", self.congestion_control + _min_rto(self.min_rto_s)),
        ]
        if self.port_rate_bits_per_s != self.rate_bits_per_s:
            rows.insert(
                2, ("rate towards the host", _each(self.port_rate_bits_per_s, q.show_rate, "not limited"))
            )
        if self.priority:
            rows.append(("priority", "strict, by DSCP class selector"))
        if self.mark_bytes is not None:
            rows.append(("ECN marks above", sizes.show_size(self.mark_bytes)))
        if self.drop_bytes is not None:
            shown = _each(self.drop_limits() or (), sizes.show_size, "")
            rows.append(("drops not-ECN above", shown))
        if self.racks > 1:
            uplink = "not limited" if self.uplink_bits_per_s is None else q.show_rate(self.uplink_bits_per_s)
            rows.append(("racks, uplink of each", f"{self.racks}, {uplink}"))
        if self.links > 1:
            rows.append(("links a host", str(self.links)))
        return rows

    def _packets_matter(self) -> bool:
        thresholds = self.mark_bytes is not None or self.drop_bytes is not None
        slow = all(rate is not None and rate <= _CHEAP for rate in self.rate_bits_per_s)
        return any(self.loss_ratio) or thresholds or self.priority or slow

    def _check_lengths(self) -> None:
        for option, values in self._per_host().items():
            if len(values) != self.hosts:
                raise ConfigurationError(
                    f"{option} holds {len(values)} values for {self.hosts} host(s). Pass one a host."
                )

    def _per_host(self) -> dict[str, tuple[float | None, ...]]:
        return {
            "--ranks-per-host": self.ranks_per_host,
            "--rate": self.rate_bits_per_s,
            "--port-rate": self.port_rate_bits_per_s,
            "--loss": self.loss_ratio,
            "--cpu": self.cores,
        }

    def _check_values(self) -> None:
        for ranks in self.ranks_per_host:
            _whole(ranks, "ranks-per-host", 1, 1024, "every host runs at least one rank")
        for option in ("--rate", "--port-rate"):
            for value in self._per_host()[option]:
                _check_rate(value, option)
        _check_rate(self.uplink_bits_per_s, "--uplink")
        for ratio in self.loss_ratio:
            if not 0 <= ratio < 1:
                raise ConfigurationError(
                    f"--loss {ratio * 100:g}% is not possible. It must be at least 0% and less than 100%."
                )
        for cores in self.cores:
            if cores is not None and not 0.01 <= cores <= 1024:
                raise ConfigurationError(
                    f"--cpu {cores * 100:g}% is not possible. 100% is one core; give at least 1%."
                )
        for option, value in (("--delay", self.delay_s), ("--jitter", self.jitter_s)):
            if not 0 <= value <= 10:
                raise ConfigurationError(
                    f"{option} {value:g}s is not possible. It must be between 0s and 10s."
                )
        if self.min_rto_s is not None and not 0.001 <= self.min_rto_s <= 10:
            raise ConfigurationError(
                f"--min-rto {self.min_rto_s:g}s is not possible. It must be between 1ms and 10s."
            )
        _whole(self.mtu, "mtu", _SMALLEST_MTU, _LARGEST_MTU, "bytes of an IP packet")
        _whole(self.racks, "racks", 1, self.hosts, "every rack holds at least one host")
        _whole(self.links, "links", 1, MAX_LINKS, "links of a host")
        if not self.congestion_control.isidentifier():
            raise ConfigurationError(
                f"--congestion-control {self.congestion_control!r} is not the name of one; cubic, bbr and reno are."
            )

    def _check_together(self) -> None:
        largest = _SUPER_PACKET if self.offload else self.mtu + ETHERNET_HEADER
        if self.queue_bytes > _LARGEST_QUEUE:
            raise ConfigurationError(
                f"--queue {self.queue_bytes}B is too large: the kernel takes up to 4 GiB."
            )
        if self.queue_bytes < largest:
            raise ConfigurationError(
                f"--queue {self.queue_bytes}B holds no packet: one is up to {largest} bytes here "
                f"(MTU {self.mtu}, offload {'on' if self.offload else 'off'}). Pass a larger one."
            )
        drops = self.drop_limits() or ()
        if isinstance(self.drop_bytes, tuple) and len(drops) != _CLASSES:
            raise ConfigurationError(
                f"--drop holds {len(drops)} values. Pass one, or {_CLASSES} for the class selectors from 0 on."
            )
        for option, value in (("--mark", self.mark_bytes), *(("--drop", limit) for limit in drops)):
            if value is None:
                continue
            if not 0 < value <= self.queue_bytes:
                raise ConfigurationError(
                    f"{option} {value}B is not within the queue of {self.queue_bytes} bytes. Pass a smaller "
                    "threshold or a larger --queue."
                )
            if any(rate is None for rate in self.port_rate_bits_per_s):
                raise ConfigurationError(
                    f"{option} needs a rate: a port without one has no backlog. Pass --rate."
                )
        if self.offload and any(self.loss_ratio):
            raise ConfigurationError(
                "--loss and --offload do not go together: one loss would be a burst of up to 44 packets. Drop one."
            )
        if self.delay_s and any(rate is None for rate in self.rate_bits_per_s):
            raise ConfigurationError(
                "--delay also needs --rate: without a rate limit, unlimited data would be in flight."
            )
        if self.jitter_s > self.delay_s:
            raise ConfigurationError(
                f"--jitter {q.show_seconds(self.jitter_s)} is larger than the delay of {q.show_seconds(self.delay_s)}: "
                "a packet would arrive before it was sent. Pass a larger --delay."
            )
        if self.uplink_bits_per_s is not None and self.racks == 1:
            raise ConfigurationError("--uplink is what leaves a rack; pass --racks 2 or more with it.")
        if self.priority and any(rate is None for rate in self.port_rate_bits_per_s):
            raise ConfigurationError("--priority needs a rate: without one no queue forms. Pass --rate.")


def _whole(value: int, name: str, low: int, high: int, rule: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigurationError(
            f"--{name} {value} is not possible: {rule}. Pass a whole number from {low} to {high}."
        )


def _check_rate(value: float | None, option: str) -> None:
    if value is not None and not (_SLOWEST <= value <= _FASTEST and math.isfinite(value)):
        raise ConfigurationError(
            f"{option} {q.show_rate(value)} cannot be emulated; rates from {q.show_rate(_SLOWEST)} to "
            f"{q.show_rate(_FASTEST)} can."
        )


def _thresholds(text: str | None) -> int | tuple[int, ...] | None:
    if text is None:
        return None
    found = tuple(sizes.size(value.strip(), "--drop") for value in text.split(","))
    return found[0] if len(found) == 1 else found


def _each(values: tuple[float | None, ...], show: Callable[[float], str], none: str) -> str:
    """One value if all hosts are alike, else one a host."""
    shown = [none if value is None else show(value) for value in values]
    return shown[0] if len(set(shown)) == 1 else ", ".join(shown)


def _show_delay(delay_s: float, jitter_s: float) -> str:
    if not delay_s:
        return "none added"
    return q.show_seconds(delay_s) + (f" +- {q.show_seconds(jitter_s)}" if jitter_s else "")


def _min_rto(min_rto_s: float | None) -> str:
    return "" if min_rto_s is None else f", smallest retransmission timeout {q.show_seconds(min_rto_s)}"
