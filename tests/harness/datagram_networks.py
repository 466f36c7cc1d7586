"""Simulated networks for the bounded-loss protocol: endpoints in one process, and a clock that is a number."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline_lossy import Bound
from paceline_lossy.datagrams import endpoint_state as e
from paceline_lossy.datagrams.endpoint import Endpoint

PAYLOAD, TICK_US, ROWS = 64, 500, 64
HEADERS = 14 + 20 + 8  # Ethernet, IP, UDP

Datagram = NDArray[np.uint8]


def endpoints(
    ranks: int,
    silence_us: int = 10**12,
    payload: int = PAYLOAD,
    generation: int = 0,
    ports: int = 1,
    servers: int = 0,
) -> list[Endpoint]:
    """Return one endpoint per rank, each with `ports` ports. Those of different generations have different keys.

    If there are servers, they are the first ranks.
    """
    return [
        Endpoint(
            rank,
            ranks,
            {
                peer: bytes([generation % 256, min(rank, peer), max(rank, peer), 7]) * 8
                for peer in range(ranks)
                if peer != rank
            },
            payload,
            silence_us,
            num_servers=servers,
            num_ports=ports,
        )
        for rank in range(ranks)
    ]


class Mailer:
    """Memory to move datagrams out of and into endpoints of one job."""

    def __init__(self, end: Endpoint) -> None:
        self.rows = np.zeros((ROWS, end.row_bytes), np.uint8)
        self.sizes, self.ways = np.zeros(ROWS, np.int64), np.zeros(ROWS, np.int64)

    def take(
        self, end: Endpoint, now_us: int, most: int | Sequence[int] = 1 << 30
    ) -> list[tuple[int, Datagram]]:
        """Return the datagrams that an endpoint sends now, each with its way (with one port, the peer)."""
        count = end.transmit(self.rows, self.sizes, self.ways, now_us, most)
        return [(int(self.ways[i]), self.rows[i, : self.sizes[i]].copy()) for i in range(count)]

    def hand(self, end: Endpoint, datagrams: Sequence[Datagram], now_us: int) -> None:
        """Let an endpoint receive datagrams, at most ROWS."""
        for i, datagram in enumerate(datagrams):
            size = min(len(datagram), self.rows.shape[1])
            self.rows[i, :size] = datagram[:size]
            self.sizes[i] = len(datagram)
        end.receive(self.rows, self.sizes, np.zeros(ROWS, np.int64), len(datagrams), now_us)


class Network:
    """A network that loses, repeats, reorders and corrupts datagrams, by a seed."""

    def __init__(
        self, seed: int, lose: float = 0.0, repeat: float = 0.0, delay: float = 0.0, corrupt: float = 0.0
    ) -> None:
        self.random = random.Random(seed)
        self.lose, self.repeat, self.delay, self.corrupt = lose, repeat, delay, corrupt
        self.under_way: list[tuple[int, int, Datagram]] = []
        self.corrupted = 0

    def carry(self, now_us: int, peer: int, datagram: Datagram) -> None:
        """Send a datagram to `peer`."""
        dice = self.random
        for _ in range(2 if dice.random() < self.repeat else 1):
            if dice.random() < self.lose:
                continue
            arrives = datagram.copy()
            if dice.random() < self.corrupt:
                arrives[dice.randrange(len(arrives))] ^= 1 << dice.randrange(8)
                self.corrupted += 1
            late = dice.randrange(20) * TICK_US if dice.random() < self.delay else 0
            self.under_way.append((now_us + TICK_US + late, peer, arrives))

    def arrived(self, now_us: int) -> list[tuple[int, int, Datagram]]:
        """Return the datagrams that have arrived by now: times, peers, datagrams."""
        here = [entry for entry in self.under_way if entry[0] <= now_us]
        self.under_way = [entry for entry in self.under_way if entry[0] > now_us]
        return here


class Switch:
    """Hosts behind links of one rate, and a switch whose ports drop what does not fit into their queues.

    Args:
        ranks: How many hosts.
        rate_bits_per_s: Of each host's link, either way.
        lose: The part of all datagrams that is lost at random.
        queue_bytes: What a port holds.
        way_us: From a port to the host.
        local: Datagrams that a host keeps in its own queue.
        seed: Of the losses.
    """

    def __init__(
        self,
        ranks: int,
        rate_bits_per_s: float,
        lose: float = 0.0,
        queue_bytes: int = 256 * 1024,
        way_us: int = 50,
        local: int = 16,
        seed: int = 0,
    ) -> None:
        self.ranks, self.lose, self.queue_bytes = ranks, lose, queue_bytes
        self.way_us, self.local = way_us, local
        self.bytes_per_us = rate_bits_per_s / 8e6
        self.random = random.Random(seed)
        self.dropped = self.lost = 0
        self._free_us, self._port_free_us = [0.0] * ranks, [0.0] * ranks
        self._queued: list[deque[float]] = [deque() for _ in range(ranks)]
        self._arriving: list[list[tuple[float, int, Datagram]]] = [[] for _ in range(ranks)]
        self._count = 0

    def room(self, rank: int, now_us: int) -> int:
        """Return how many chunks fit into a host's own queue."""
        queued = self._queued[rank]
        while queued and queued[0] <= now_us:
            queued.popleft()
        return max(0, self.local - len(queued))

    def send(self, rank: int, peer: int, datagram: Datagram, now_us: int) -> None:
        """Put a datagram into a host's own queue, and from there into the port's."""
        size = len(datagram) + HEADERS
        left_us = self._free_us[rank] = max(self._free_us[rank], now_us) + size / self.bytes_per_us
        self._queued[rank].append(left_us)
        if self.random.random() < self.lose:
            self.lost += 1
            return
        waiting = max(0.0, self._port_free_us[peer] - left_us) * self.bytes_per_us
        if waiting + size > self.queue_bytes:
            self.dropped += 1
            return
        self._port_free_us[peer] = max(self._port_free_us[peer], left_us) + size / self.bytes_per_us
        self._count += 1
        arrives_us = self._port_free_us[peer] + self.way_us
        heapq.heappush(self._arriving[peer], (arrives_us, self._count, datagram))

    def arrived(self, rank: int, now_us: int, most: int) -> list[Datagram]:
        """Return the datagrams that have arrived at a host."""
        arriving = self._arriving[rank]
        here: list[Datagram] = []
        while arriving and arriving[0][0] <= now_us and len(here) < most:
            here.append(heapq.heappop(arriving)[2])
        return here


def time_of_sums(
    switch: Switch,
    vectors: Sequence[Sequence[NDArray[Any]]],
    bound: float = 0.0,
    payload: int = 1432,
    turn_us: int = 400,
    more: Sequence[Switch] = (),
    servers: int = 0,
) -> tuple[list[int], list[Endpoint]]:
    """Sum the vectors, one after the other, in virtual time.

    A host's turn is that of `datagram_loop`: it takes what has arrived, sends what its local queue has room for, rests.

    Args:
        switch: Between the ranks.
        vectors: [rank][number]: mutated.
        bound: As of `Bound`.
        payload: Bytes of a chunk.
        turn_us: Time between two turns of a host.
        more: What each further port of the hosts leads to: other switches, or one of these again.
        servers: How many ranks, the first ones, sum for the others.

    Returns:
        Microseconds that each sum took, from the first rank's start to the last one's end; and the endpoints.
    """
    behind = [switch, *more]
    ends = endpoints(switch.ranks, payload=payload, ports=len(behind), servers=servers)
    mailer = Mailer(ends[0])
    turns = [(1000 + 37 * rank, rank) for rank in range(switch.ranks)]
    heapq.heapify(turns)
    took_us = []
    for number in range(len(vectors[0])):
        begun_us: dict[int, int] = {}
        ended_us: dict[int, int] = {}
        while len(ended_us) < switch.ranks:
            now_us, rank = heapq.heappop(turns)
            end = ends[rank]
            if rank not in begun_us:
                end.begin(vectors[rank][number], Bound(bound), now_us)
                begun_us[rank] = now_us
            for each in dict.fromkeys(behind):
                here = each.arrived(rank, now_us, ROWS)
                if here:
                    mailer.hand(end, here, now_us)
            while leaving := mailer.take(end, now_us, [each.room(rank, now_us) for each in behind]):
                for way, datagram in leaving:
                    behind[way % len(behind)].send(rank, way // len(behind), datagram, now_us)
            if end.take_finished():
                ended_us[rank] = now_us
            heapq.heappush(turns, (now_us + turn_us, rank))
            assert now_us < 600_000_000, "it does not end"
        took_us.append(max(ended_us.values()) - min(begun_us.values()))
    return took_us, ends


def strangers(ends: Sequence[Endpoint]) -> int:
    """Return how many datagrams these endpoints counted as a stranger's."""
    return sum(int(end.tables.numbers[e.STRANGERS]) for end in ends)
