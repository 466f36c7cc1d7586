"""What is compared on a simulated network: TCPs and the bounded-loss protocol, by name; and how each sums or pushes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.transports import Bound
from paceline.transports.bounded_loss.datagram import HEADER_BYTES, payload_room
from paceline_lab.packet_network import tcp_state as c
from paceline_lab.packet_network.datagram_hosts import DatagramHosts, JobPlan
from paceline_lab.packet_network.leaf_spine import LeafSpine
from paceline_lab.packet_network.state import counts, new_network
from paceline_lab.packet_network.tcp_flows import TcpFlows, TcpKind

_PAYLOAD = payload_room(1500)


@dataclass(frozen=True)
class Datagrams:
    """The bounded-loss protocol; fields are those of `JobPlan`; `protected_ratio` and `is_early` are `Bound`'s."""

    bound: float
    is_sprayed: bool = False
    has_classes: bool = False
    protected_ratio: float = 0.0
    num_ports: int = 1
    is_early: bool = False


SIDES: dict[str, TcpKind | Datagrams] = {
    "cubic": TcpKind(c.CUBIC),
    "cubic, rto_min 5 ms": TcpKind(c.CUBIC, 5.0),
    "tuned": TcpKind(c.BBR, 5.0),
    "DCTCP": TcpKind(c.DCTCP),
    "DCTCP, rto_min 5 ms": TcpKind(c.DCTCP, 5.0),
    "cubic, sprayed": TcpKind(c.CUBIC, is_sprayed=True),
    "tuned, sprayed": TcpKind(c.BBR, 5.0, is_sprayed=True),
    "ours, bound 0": Datagrams(0.0),
    "ours, bound 5 %": Datagrams(0.05),
    "ours, bound 0, sprayed": Datagrams(0.0, True),
    "ours, bound 0, eight ports": Datagrams(0.0, num_ports=8),
    "ours, 5 %, sprayed": Datagrams(0.05, True),
    "ours, 5 %, classes": Datagrams(0.05, False, True, 0.5),
    "ours, 5 %, sprayed, classes": Datagrams(0.05, True, True, 0.5),
}
"""Tuned is BBR with a smallest retransmission timeout of 5 ms."""


@dataclass(frozen=True)
class Traffic:
    """What is sent.

    Attributes:
        jobs: The hosts of each job, rank by rank.
        num_bytes: Of each rank's vector.
        is_push: Whether it goes to the job's first rank; else all sum it (TCP around a ring, ours by shards).
        num_vectors: How many layers the vector is cut into; TCP sends it in one piece.
        repeats: One after the other.
        pause_us: Between them.
        turn_us: Between two turns of a host that runs our protocol.
        jitter_us: By which it is late.
        handing_over_us: Until a host goes on with a message that TCP delivered.
    """

    jobs: Sequence[Sequence[int]]
    num_bytes: int
    is_push: bool
    num_vectors: int = 1
    repeats: int = 5
    pause_us: int = 60_000
    turn_us: int = 400
    jitter_us: int = 0
    handing_over_us: float = 60.0


@dataclass(frozen=True)
class Times:
    """What a side took.

    Attributes:
        job_ms: For each repeat and job, until all of it was there.
        flow_ms: For each repeat and flow of a push, until it had arrived (a ring's: each rank's).
        first_layer_ms: For each repeat and job, until the layer launched last was there, which a forward needs first.
        packets: What became of all, as of `state.counts`.
        lost_ratio: Of the contributions, let go within the bound.
    """

    job_ms: tuple[float, ...]
    flow_ms: tuple[float, ...]
    first_layer_ms: tuple[float, ...]
    packets: dict[str, int]
    lost_ratio: float


def measure(side: str | TcpKind | Datagrams, spec: LeafSpine, traffic: Traffic, seed: int) -> Times:
    """Let a side, or that of `SIDES` with this name, do what `traffic` says; the same seed gives the same times.

    A network that marks does so for sides that understand it; it drops what is not ECN-capable for those with classes
    only.
    """
    kind = SIDES[side] if isinstance(side, str) else side
    if isinstance(kind, TcpKind):
        return _tcp(kind, replace(spec, drop_bytes=None), traffic, seed)
    return _datagrams(kind, spec if kind.has_classes else replace(spec, drop_bytes=None), traffic, seed)


def _tcp(kind: TcpKind, spec: LeafSpine, traffic: Traffic, seed: int) -> Times:
    net = new_network(spec, seed)
    flows = TcpFlows(
        net,
        kind,
        traffic.jobs,
        traffic.num_bytes,
        traffic.is_push,
        spec.rate_bits_per_s,
        seed,
        traffic.handing_over_us,
    )
    job_ms: list[float] = []
    flow_ms: list[float] = []
    flows.run()  # connections begin with what they know of the path
    for _ in range(traffic.repeats):
        for of_job in flows.run(traffic.pause_us):
            job_ms.append(max(of_job))
            flow_ms += of_job
    return Times(tuple(job_ms), tuple(flow_ms), tuple(job_ms), counts(net), 0.0)


def _datagrams(kind: Datagrams, spec: LeafSpine, traffic: Traffic, seed: int) -> Times:
    net = new_network(spec, seed, HEADER_BYTES + _PAYLOAD)
    plans = [
        JobPlan(
            hosts,
            traffic.num_bytes // traffic.num_vectors,
            Bound(kind.bound, kind.protected_ratio, is_early=kind.is_early),
            int(traffic.is_push),
            traffic.num_vectors,
            kind.is_sprayed,
            kind.has_classes,
            kind.num_ports,
        )
        for hosts in traffic.jobs
    ]
    hosts = DatagramHosts(
        net, c.new_connections(1), plans, _PAYLOAD, seed, traffic.turn_us, traffic.jitter_us
    )
    job_ms: list[float] = []
    flow_ms: list[float] = []
    first_ms: list[float] = []
    lost = expected = 0
    hosts.run()
    for _ in range(traffic.repeats):
        for job in hosts.run(traffic.pause_us):
            newest = max(number for _, number in job.ended_us)
            ended = {key: us for key, us in job.ended_us.items() if key[0] == 0 or not traffic.is_push}
            job_ms.append((max(ended.values()) - job.begun_us) / 1e3)
            last_of = (us for (_, number), us in ended.items() if number == newest)
            first_ms.append((max(last_of) - job.begun_us) / 1e3)
            flow_ms += _whole_flows(job.flow_us, job.begun_us)
            lost, expected = lost + job.lost, expected + job.expected
    return Times(tuple(job_ms), tuple(flow_ms), tuple(first_ms), counts(net), lost / max(1, expected))


def _whole_flows(flow_us: dict[tuple[int, int, int], int], begun_us: int) -> list[float]:
    """When all layers of a flow had arrived, in ms."""
    last: dict[tuple[int, int], int] = {}
    for (_, source, target), us in flow_us.items():
        last[source, target] = max(us, last.get((source, target), 0))
    return [(us - begun_us) / 1e3 for us in last.values()]
