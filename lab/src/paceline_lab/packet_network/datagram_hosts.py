"""Hosts of a simulated network that run the bounded-loss protocol: the transport's own `Endpoint`, in virtual time.

A host takes turns as `datagram_loop` does: it takes what has arrived, sends what its own queue has room for (by the
same functions), and rests. What is done for a datagram is compiled, a turn is Python.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from paceline.transports import Bound
from paceline.transports.bounded_loss import datagram_loop as loop
from paceline.transports.bounded_loss import endpoint_state as e
from paceline.transports.bounded_loss.datagram import words_of
from paceline.transports.bounded_loss.endpoint import Endpoint
from paceline_lab.packet_network import engine
from paceline_lab.packet_network.state import BYTES, Net, check_room
from paceline_lab.packet_network.tcp_state import Tcp

SPRAYED = -1
_ROWS = 64
_BATCHES = 4
_HIGHEST = 5
_HASH = 7919  # odd: the ports of a rank take all ways in turn
_SILENCE_US = 10**12
_LONGEST_US = 600_000_000


@dataclass(frozen=True)
class JobPlan:
    """A job of ranks that sum vectors, or push them to some of them.

    Attributes:
        hosts: Of the ranks, in their order.
        num_bytes: Of each vector.
        bound: What may be lost.
        num_servers: As of `Endpoint`.
        num_vectors: How many are launched at once, one after the other: the layers of a model, the last one first.
        is_sprayed: Whether every packet takes any way; else a flow takes one, by the seed.
        has_classes: Whether layers have classes, the one launched last the first; what may be lost is then not
            ECN-capable.
        num_ports: By how many ports each rank sends: a flow then takes as many ways, by the seed; its windows are by
            port, the host's queue is one.
    """

    hosts: Sequence[int]
    num_bytes: int
    bound: Bound
    num_servers: int = 0
    num_vectors: int = 1
    is_sprayed: bool = False
    has_classes: bool = False
    num_ports: int = 1

    def bound_of(self, layer: int) -> Bound:
        """What may be lost of one of the vectors, with its class."""
        if not self.has_classes:
            return self.bound
        return replace(self.bound, priority=max(1, _HIGHEST * (layer + 1) // self.num_vectors))


@dataclass
class _Job:
    plan: JobPlan
    ends: list[Endpoint]
    flow: int
    begun_us: int = 0
    running: int = 0
    flow_us: dict[tuple[int, int, int], int] = field(default_factory=dict)
    ended_us: dict[tuple[int, int], int] = field(default_factory=dict)
    lost: int = 0
    expected: int = 0


class DatagramHosts:
    """Jobs on a network, one host a rank.

    Args:
        net: The network; its rows hold a datagram.
        tcp: Connections on it, if there are any.
        jobs: What runs.
        payload: Bytes of a chunk.
        seed: Of the flows' ways, and of what follows.
        turn_us: Between two turns of a host.
        jitter_us: Mean of what a host is late, since others use its core; exponentially distributed.
    """

    def __init__(
        self,
        net: Net,
        tcp: Tcp,
        jobs: Sequence[JobPlan],
        payload: int = 1432,
        seed: int = 0,
        turn_us: int = 400,
        jitter_us: int = 0,
    ) -> None:
        self._net, self._tcp = net, tcp
        dice = self._dice = np.random.default_rng(seed)
        self._turn_us, self._jitter_us = turn_us, jitter_us
        self._jobs = [self._new_job(plan, payload, int(dice.integers(1 << 20))) for plan in jobs]
        self._rows = np.zeros((_ROWS, self._jobs[0].ends[0].row_bytes), np.uint8)
        self._words, _ = words_of(self._rows)
        self._sizes, self._ways = np.zeros(_ROWS, np.int64), np.zeros(_ROWS, np.int64)
        self._marks = np.zeros(_ROWS, np.int64)
        self._local = {
            host: np.array([loop.SMALLEST_LIMIT, loop.LARGEST_LIMIT, 0, 0], np.int64)
            for plan in jobs
            for host in plan.hosts
        }
        self._drain = {host: np.zeros(3) for host in self._local}
        self.now_us = 1000
        ranks = [(job, rank) for job in self._jobs for rank in range(len(job.ends))]
        self._turns = [
            (self.now_us + 37 * number % turn_us, number, *each) for number, each in enumerate(ranks)
        ]
        heapq.heapify(self._turns)

    def _new_job(self, plan: JobPlan, payload: int, flow: int) -> _Job:
        ranks = len(plan.hosts)
        ends = []
        for rank in range(ranks):
            keys = {
                peer: bytes([min(rank, peer), max(rank, peer)]) * 8 for peer in range(ranks) if peer != rank
            }
            ends.append(Endpoint(rank, ranks, keys, payload, _SILENCE_US, plan.num_servers, plan.num_ports))
        return _Job(plan, ends, flow)

    def run(self, at_least_us: int = 0) -> list[_Job]:
        """Let every job sum its vectors once; returns the jobs, with the times at which all of it was done.

        Args:
            at_least_us: A pause before that.
        """
        begin_us = self.now_us + at_least_us
        for job in self._jobs:
            job.flow_us, job.ended_us, job.begun_us = {}, {}, begin_us
            job.running, job.lost, job.expected = len(job.ends) * job.plan.num_vectors, 0, 0
        waiting = {(id(job), rank) for job in self._jobs for rank in range(len(job.ends))}
        vectors: list[NDArray[np.float32]] = []
        while any(job.running for job in self._jobs):
            self.now_us, number, job, rank = heapq.heappop(self._turns)
            if self.now_us >= begin_us and (id(job), rank) in waiting:
                waiting.remove((id(job), rank))
                for layer in range(job.plan.num_vectors):
                    vectors.append(np.ones(job.plan.num_bytes // 4, np.float32))
                    job.ends[rank].begin(vectors[-1], job.plan.bound_of(layer), self.now_us)
            self._turn(job, rank)
            rest_us = self._turn_us + int(self._dice.exponential(self._jitter_us))
            heapq.heappush(self._turns, (self.now_us + rest_us, number, job, rank))
            assert self.now_us < begin_us + _LONGEST_US, "it does not end"
        check_room(self._net)
        return self._jobs

    def _turn(self, job: _Job, rank: int) -> None:
        """What `datagram_loop.drive` does between two rests."""
        net, end, host = self._net, job.ends[rank], job.plan.hosts[rank]
        engine.run_until(net, self._tcp, self.now_us * 1000, False)
        has_arrived = net.arrived[host, BYTES] > 0
        if not has_arrived and end.is_idle:
            return
        while net.arrived[host, BYTES]:
            got = engine.take_datagrams(net, host, self._rows, self._sizes, self._marks)
            end.receive(self._rows, self._sizes, self._marks, got, self.now_us)
        self._note_arrivals(job, rank)
        targets, ports = np.asarray(job.plan.hosts), job.plan.num_ports
        for _ in range(_BATCHES):
            local, queued = self._local[host], engine.queued_bytes(net, host)
            end.tables.local_us[:] = loop.note_drain(self._drain[host], queued, self.now_us)
            most = loop.queue_room(local, queued, self._rows.shape[1])
            count = end.transmit(
                self._rows, self._sizes, self._ways, self.now_us, [-(-most // ports)] * ports
            )
            if not end.room_left.any():
                local[loop.WAS_FULL] = 1
            if count == 0:
                break
            peers, by = self._ways[:count] // ports, self._ways[:count] % ports
            spines = np.full(count, SPRAYED) if job.plan.is_sprayed else job.flow + rank + by * _HASH
            engine.send_datagrams(
                net, self._rows, self._words, self._sizes, targets[peers], host, count, spines
            )
        for losses in end.take_finished():
            job.running -= 1
            job.ended_us[rank, losses.collective] = self.now_us
            if rank == 0:
                job.lost += sum(losses.missing)
                job.expected += sum(losses.expected)

    def _note_arrivals(self, job: _Job, rank: int) -> None:
        """When each peer's part of the vectors was here: a flow of a push."""
        if rank >= (job.plan.num_servers or len(job.ends)):
            return
        t = job.ends[rank].tables
        for slot in range(e.SLOTS):
            collective = int(t.slots[slot, e.S_COLLECTIVE])
            if collective < 0:
                continue
            for peer in np.flatnonzero(t.incoming[slot, 0, :, e.I_DONE]):
                if peer != rank and peer >= job.plan.num_servers:
                    job.flow_us.setdefault((collective, int(peer), rank), self.now_us)
