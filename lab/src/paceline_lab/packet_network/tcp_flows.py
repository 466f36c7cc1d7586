"""What runs over simulated TCP: Gloo's ring, and pushes to a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.errors import ConfigurationError
from paceline_lab.packet_network import engine
from paceline_lab.packet_network import tcp_state as c
from paceline_lab.packet_network.state import NOW, Net, check_room

_LONGEST_NS = 600 * 10**9
_LARGEST_SEGMENT = 1 << 20
_NOTICE_BYTES = 48


@dataclass(frozen=True)
class TcpKind:
    """A TCP.

    Attributes:
        control: CUBIC, DCTCP or BBR of `tcp_state`.
        min_rto_ms: Smallest retransmission timeout.
        is_sprayed: Whether every packet takes any way.
    """

    control: int
    min_rto_ms: float = 200.0
    is_sprayed: bool = False


class TcpFlows:
    """Connections of jobs on a network; they live from run to run, as between the steps of a training.

    Args:
        net: The network.
        kind: Of all connections.
        jobs: The hosts of each.
        num_bytes: Of each rank's vector.
        is_push: Whether all send it to the first; else they sum it around a ring as Gloo does.
        rate_bits_per_s: Of a host's link.
        seed: Of the flows' ways.
        handing_over_us: From a message's last byte until its receiver goes on.
    """

    def __init__(
        self,
        net: Net,
        kind: TcpKind,
        jobs: Sequence[Sequence[int]],
        num_bytes: int,
        is_push: bool,
        rate_bits_per_s: float,
        seed: int = 0,
        handing_over_us: float = 60.0,
    ) -> None:
        self._net, self._kind, self._jobs, self._is_push = net, kind, jobs, is_push
        self._dice = np.random.default_rng(seed)
        self._host_limit = max(2, round(rate_bits_per_s * 1e-3 / 8 / (c.SEGMENT_BYTES + c.HEADER_BYTES)))
        a_job = [len(hosts) - 1 if is_push else 2 * len(hosts) for hosts in jobs]
        self.tcp = c.new_connections(sum(a_job), handing_over_us)
        self._data: list[list[int]] = []
        first = 0
        for hosts, count in zip(jobs, a_job, strict=True):
            if is_push:
                made = [self._connect(first + i, hosts[i + 1], hosts[0], num_bytes) for i in range(count)]
            else:
                made = self._connect_ring(first, hosts, num_bytes)
            self._data.append(made)
            first += count

    def _connect(self, index: int, source: int, target: int, message_bytes: int) -> int:
        x = self.tcp.connections[index]
        x[c.C_SOURCE], x[c.C_TARGET], x[c.C_KIND] = source, target, self._kind.control
        x[c.C_SPINE] = -1 if self._kind.is_sprayed else self._dice.integers(1 << 20)
        x[c.C_MIN_RTO], x[c.C_HOST_LIMIT] = round(self._kind.min_rto_ms * 1e6), self._host_limit
        packets = -(-message_bytes // c.SEGMENT_BYTES)
        x[c.C_PER_MESSAGE] = packets
        x[c.C_LAST_BYTES] = message_bytes - (packets - 1) * c.SEGMENT_BYTES
        x[c.C_GRANTED] = 1 << 40
        return index

    def _connect_ring(self, first: int, hosts: Sequence[int], num_bytes: int) -> list[int]:
        """A connection to the right neighbour for data, and one back that says which messages it waits for."""
        ranks = len(hosts)
        segments = max(-(-num_bytes // _LARGEST_SEGMENT), 2 * ranks)
        self._per_rank = -(-segments // ranks)
        data = []
        for rank, host in enumerate(hosts):
            right = hosts[(rank + 1) % ranks]
            data.append(self._connect(first + rank, host, right, -(-num_bytes // (self._per_rank * ranks))))
            self._connect(first + ranks + rank, right, host, _NOTICE_BYTES)
        for rank in range(ranks):
            x = self.tcp.connections[first + rank]
            x[c.C_NEXT], x[c.C_NOTIFY] = first + (rank + 1) % ranks, first + ranks + rank
            x[c.C_GRANTED] = 0
            self.tcp.connections[first + ranks + rank, c.C_GRANTS] = first + rank
        return data

    def run(self, pause_us: float = 0.0) -> list[list[float]]:
        """Let every job send once; returns the ms after which each of a job's flows was complete (a ring's: each rank).

        Args:
            pause_us: Of silence before that.
        """
        net, x = self._net, self.tcp.connections
        engine.run_until(net, self.tcp, int(net.clock[NOW] + pause_us * 1e3), False)
        begun_ns = int(net.clock[NOW])
        self.tcp.running[0] = len(x)
        for hosts, data in zip(self._jobs, self._data, strict=True):
            self._open(data, len(hosts))
        engine.run_until(net, self.tcp, begun_ns + _LONGEST_NS, True)
        check_room(net)
        if self.tcp.running[0]:
            raise ConfigurationError(
                f"{self.tcp.running[0]} TCP flows did not end within {_LONGEST_NS / 1e9:g} s."
            )
        return [[(int(x[index, c.C_DONE_AT]) - begun_ns) / 1e6 for index in data] for data in self._data]

    def _open(self, data: Sequence[int], ranks: int) -> None:
        x: Any = self.tcp.connections
        for index in data:
            messages, opened = 1, 1
            if not self._is_push:
                messages, opened = 2 * (ranks - 1) * self._per_rank, 2
                notices = x[index, c.C_NOTIFY]
                x[index, c.C_FIRST_PHASE] = messages // 2
                x[notices, c.C_BASE] = x[notices, c.C_TOTAL]
                x[notices, c.C_TOTAL] += messages
                x[notices, c.C_OPEN] = x[notices, c.C_BASE] + opened
            x[index, c.C_BASE] = x[index, c.C_TOTAL]
            x[index, c.C_TOTAL] += messages
            x[index, c.C_OPEN] = x[index, c.C_BASE] + opened
