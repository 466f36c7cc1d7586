"""Measures an emulated cluster: rows of what was asked for against what was measured.

1. Rate: datagrams as fast as the link takes them, from each host to the next; bytes with all headers.
2. TCP: one connection with the cluster's congestion control; bytes with all headers. It has no target.
3. Loss: small datagrams at a quarter of the rate, counted.
4. Priority: two hosts send to a third at four fifths of its port's rate each. The higher class has to arrive whole.
5. Delay: half of the median round trip of single datagrams.
6. Cores: the share of a core that a computing process gets.

Each is measured alone.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline import quantities as q
from paceline_lab.emulation import quantities as sizes
from paceline_lab.emulation.cluster import EmulatedCluster
from paceline_lab.emulation.cluster_spec import ETHERNET_HEADER, ClusterSpec
from paceline_lab.emulation.link_meter import PAYLOAD_BYTES
from paceline_lab.errors import EmulationError

if TYPE_CHECKING:
    from typing_extensions import Self

TOLERANCE = 0.05
_UDP_HEADERS = ETHERNET_HEADER + 28
_TCP_HEADERS = ETHERNET_HEADER + 52
_SECONDS = 2.0
_SEGMENTS = 50
_LOSS_BYTES = 100
_MAX_LOSS_PACKETS = 200_000
_WANTED_LOSSES = 400
_PATIENCE_S = 60.0
_HIGH, _LOW = 7 << 5, 0
_SCRIPT = str(Path(__file__).with_name("link_meter.py"))


@dataclass(frozen=True)
class Finding:
    """One thing that was measured.

    Attributes:
        what: Name of the measurement, for example `rate host0 to host1`.
        asked: Value in the spec, as text.
        measured: The same, measured.
        ok: Whether they agree; None where the spec asks nothing.
        note: Allowed difference, or a remark.
    """

    what: str
    asked: str
    measured: str
    ok: bool | None
    note: str


def check(cluster: EmulatedCluster) -> Iterator[Finding]:
    """Measure the cluster; each finding as soon as it is there.

    Contract:
        Blocks: for a few seconds a finding. The cluster must carry nothing else meanwhile.
    """
    spec = cluster.spec
    pairs = _pairs(spec)
    for source, target in pairs:
        yield from _rate(cluster, source, target)
    yield _stream(cluster, *pairs[0])
    for source in _different(spec.loss_ratio):
        if spec.loss_ratio[source]:
            yield _loss(cluster, source, (source + 1) % spec.hosts)
    if spec.priority:
        yield _priority(cluster)
    if spec.delay_s:
        yield _delay(cluster, *pairs[0])
    for host in _different(spec.cores):
        if spec.cores[host] is not None:
            yield _cores(cluster, host)


def _pairs(spec: ClusterSpec) -> list[tuple[int, int]]:
    """Return one pair of hosts for every different pair of rates, next to each other; across racks first."""
    seen: dict[object, tuple[int, int]] = {}
    for source in range(spec.hosts):
        target = (source + 1) % spec.hosts
        crosses = spec.rack_of(source) != spec.rack_of(target)
        key = (spec.rate_bits_per_s[source], spec.port_rate_bits_per_s[target], crosses)
        seen.setdefault(key, (source, target))
    return list(seen.values())


def _different(values: tuple[float | None, ...]) -> list[int]:
    return [values.index(value) for value in dict.fromkeys(values)]


def _rate(cluster: EmulatedCluster, source: int, target: int) -> Iterator[Finding]:
    spec = cluster.spec
    asked = path_rate(spec, source, target)
    seen = _datagrams(cluster, source, target)
    per_packet = PAYLOAD_BYTES + _UDP_HEADERS
    measured = seen["payload_bytes"] / PAYLOAD_BYTES * per_packet * 8 / max(seen["seconds"], 1e-9)
    # A datagram that the switch loses was on the link; what arrives is what was asked less the loss.
    expected = None if asked is None else asked * (1 - spec.loss_ratio[source])
    ok = None if expected is None else abs(measured / expected - 1) <= TOLERANCE
    shown = "not limited" if asked is None else q.show_rate(asked)
    note = "" if asked is None else f"{measured / (expected or asked) - 1:+.1%}, allowed 5%"
    yield Finding(f"rate host{source} to host{target}", shown, q.show_rate(measured), ok, note)


def _datagrams(
    cluster: EmulatedCluster, source: int, target: int, *, seconds: float = _SECONDS, **changes: Any
) -> Any:
    segments = _SEGMENTS if cluster.spec.offload else 8
    sending = {
        "seconds": seconds,
        "packets": 0,
        "rate": 0,
        "size": PAYLOAD_BYTES,
        "tos": 0,
        "segments": segments,
    }
    with _Probe(cluster, target, "receive_datagrams") as receiver:
        to = (cluster.hosts[target].address, receiver.receive()["port"])
        with _Probe(cluster, source, "send_datagrams", to=to, **(sending | changes)) as sender:
            sent = sender.receive()
        return receiver.receive() | {"sent": sent["packets"]}


def _stream(cluster: EmulatedCluster, source: int, target: int) -> Finding:
    with _Probe(cluster, target, "receive_stream") as receiver:
        port = receiver.receive()["port"]
        where = {"address": cluster.hosts[target].address, "port": port, "seconds": _SECONDS}
        with _Probe(cluster, source, "send_stream", **where):
            seen = receiver.receive()
    segment = cluster.spec.mtu - 52
    wire = seen["payload_bytes"] * (segment + _TCP_HEADERS) / segment * 8 / max(seen["seconds"], 1e-9)
    asked = path_rate(cluster.spec, source, target)
    note = "" if asked is None else f"{wire / asked:.0%} of the rate, {cluster.spec.congestion_control}"
    return Finding(f"TCP host{source} to host{target}", "", q.show_rate(wire), None, note)


def _loss(cluster: EmulatedCluster, source: int, target: int) -> Finding:
    asked = cluster.spec.loss_ratio[source]
    packets = min(_MAX_LOSS_PACKETS, max(2000, round(_WANTED_LOSSES / asked)))
    rate = path_rate(cluster.spec, source, target)
    # A quarter of the link leaves no queue, headers included, and what Python sends and receives without losing any.
    payload_per_s = min(4e6, (rate or 1e9) / 8 / 4 * _LOSS_BYTES / (_LOSS_BYTES + _UDP_HEADERS))
    packets = min(packets, max(2000, round(payload_per_s / _LOSS_BYTES * 20)))
    seen = _datagrams(
        cluster, source, target, packets=packets, rate=payload_per_s, size=_LOSS_BYTES, segments=1
    )
    measured = 1 - seen["packets"] / seen["sent"]
    chance = 3 * math.sqrt(asked * (1 - asked) / packets)
    return Finding(
        f"loss host{source} to host{target}",
        sizes.show_percentage(asked),
        f"{measured * 100:.3g} %",
        abs(measured - asked) <= chance,
        f"of {packets} datagrams; chance allows +-{chance * 100:.2g}",
    )


def _priority(cluster: EmulatedCluster) -> Finding:
    what, asked = "priority of CS7 over CS0", "100 % of CS7 arrives"
    if cluster.spec.hosts < 3:
        return Finding(what, asked, "not measured", None, "two senders and a receiver are needed: --hosts 3")
    first, second, target = 0, 1, 2
    port_rate = cluster.spec.port_rate_bits_per_s[target] or 0.0
    headers = PAYLOAD_BYTES / (PAYLOAD_BYTES + _UDP_HEADERS)
    rate = 0.8 * headers / 8 * min(filter(None, (port_rate, *cluster.spec.rate_bits_per_s[:2])))
    sending = {
        "seconds": _SECONDS,
        "packets": 0,
        "rate": rate,
        "size": PAYLOAD_BYTES,
        "segments": 1,
    }
    address = cluster.hosts[target].address
    with (
        _Probe(cluster, target, "receive_datagrams") as high,
        _Probe(cluster, target, "receive_datagrams") as low,
    ):
        to_high, to_low = high.receive()["port"], low.receive()["port"]
        with (
            _Probe(cluster, first, "send_datagrams", tos=_HIGH, to=(address, to_high), **sending) as urgent,
            _Probe(cluster, second, "send_datagrams", tos=_LOW, to=(address, to_low), **sending) as other,
        ):
            sent = urgent.receive()["packets"], other.receive()["packets"]
        arrived = high.receive()["packets"] / sent[0], low.receive()["packets"] / sent[1]
    expected = 1 - cluster.spec.loss_ratio[first]
    return Finding(
        what,
        asked,
        f"{arrived[0] * 100:.1f} % and {arrived[1] * 100:.1f} % of CS0",
        arrived[0] >= expected - 0.005 and arrived[1] < arrived[0],
        "both send at 80 % of the port's rate",
    )


def _delay(cluster: EmulatedCluster, source: int, target: int) -> Finding:
    with _Probe(cluster, target, "echo") as listener:
        where = {"address": cluster.hosts[target].address, "port": listener.receive()["port"]}
        with _Probe(cluster, source, "ask", times=100, **where) as asking:
            trips_s = asking.receive()["trips_s"]
    asked, measured = cluster.spec.delay_s, median(trips_s) / 2
    allowed = max(TOLERANCE * asked, 0.0005) + cluster.spec.jitter_s / 5
    spread = f"{q.show_seconds(min(trips_s) / 2)} to {q.show_seconds(max(trips_s) / 2)}"
    return Finding(
        f"delay host{source} to host{target}",
        q.show_seconds(asked),
        q.show_seconds(measured),
        abs(measured - asked) <= allowed,
        f"half the median round trip; {spread}; allowed +-{q.show_seconds(allowed)}",
    )


def _cores(cluster: EmulatedCluster, host: int) -> Finding:
    asked = cluster.spec.cores[host] or 0.0
    with _Probe(cluster, host, "spin", seconds=_SECONDS) as spinning:
        measured = spinning.receive()["cores"]
    expected = min(asked, 1.0)
    ok = abs(measured / expected - 1) <= TOLERANCE
    return Finding(
        f"cores of host{host}",
        f"{asked:g}",
        f"{measured:.3g}",
        ok,
        "by one process, of a core" if asked <= 1 else "one process cannot use more than one",
    )


def path_rate(spec: ClusterSpec, source: int, target: int) -> float | None:
    """Return the lowest rate between two hosts; None if nothing is limited."""
    limits = [spec.rate_bits_per_s[source], spec.port_rate_bits_per_s[target]]
    if spec.rack_of(source) != spec.rack_of(target):
        limits.append(spec.uplink_bits_per_s)
    return min((limit for limit in limits if limit is not None), default=None)


class _Probe:
    """`link_meter.py` running on a host; a context manager that ends it."""

    def __init__(self, cluster: EmulatedCluster, host: int, role: str, **arguments: object) -> None:
        self._what = f"{role} on host{host}"
        self._process = subprocess.Popen(
            cluster.hosts[host].command([sys.executable, "-I", "-S", _SCRIPT, role, json.dumps(arguments)]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate(timeout=_PATIENCE_S)

    def receive(self) -> Any:
        """The probe's next message."""
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            _, errors = self._process.communicate(timeout=_PATIENCE_S)
            reason = errors.strip().splitlines()[-1] if errors.strip() else "it said nothing"
            raise EmulationError(f"the measurement '{self._what}' failed: {reason}")
        return json.loads(line)
