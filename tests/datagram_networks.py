"""Networks that tests play for the bounded-loss protocol: endpoints in one process, a clock that is a number."""

from __future__ import annotations

import heapq
import random
from collections import deque

import numpy as np

from paceline.transports import Bound
from paceline.transports.bounded_loss import endpoint_state as e
from paceline.transports.bounded_loss.endpoint import Endpoint

PAYLOAD, TICK_US, ROWS = 64, 500, 64
HEADERS = 14 + 20 + 8  # Ethernet, IP, UDP


def endpoints(ranks, silence_us=10**12, payload=PAYLOAD, generation=0):
    """One endpoint a rank; those of different generations have different keys."""
    return [
        Endpoint(
            rank,
            ranks,
            {
                peer: bytes([generation, min(rank, peer), max(rank, peer), 7]) * 8
                for peer in range(ranks)
                if peer != rank
            },
            payload,
            silence_us,
        )
        for rank in range(ranks)
    ]


class Mailer:
    """Memory to move datagrams out of and into endpoints."""

    def __init__(self, end):
        self.rows = np.zeros((ROWS, end.row_bytes), np.uint8)
        self.sizes, self.peers = np.zeros(ROWS, np.int64), np.zeros(ROWS, np.int64)

    def take(self, end, now_us, most=1 << 30):
        """What an endpoint sends now: pairs of a peer and a datagram."""
        count = end.transmit(self.rows, self.sizes, self.peers, now_us, most)
        return [(int(self.peers[i]), self.rows[i, : self.sizes[i]].copy()) for i in range(count)]

    def hand(self, end, datagrams, now_us):
        """Let an endpoint receive datagrams, at most ROWS."""
        for i, datagram in enumerate(datagrams):
            size = min(len(datagram), self.rows.shape[1])
            self.rows[i, :size] = datagram[:size]
            self.sizes[i] = len(datagram)
        end.receive(self.rows, self.sizes, np.zeros(ROWS, np.int64), len(datagrams), now_us)


class Network:
    """Loses, repeats, delays (so reorders) and corrupts datagrams, by a seed."""

    def __init__(self, seed, lose=0.0, repeat=0.0, delay=0.0, corrupt=0.0):
        self.random = random.Random(seed)
        self.lose, self.repeat, self.delay, self.corrupt = lose, repeat, delay, corrupt
        self.under_way = []
        self.corrupted = 0

    def carry(self, now_us, peer, datagram):
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

    def arrived(self, now_us):
        here = [entry for entry in self.under_way if entry[0] <= now_us]
        self.under_way = [entry for entry in self.under_way if entry[0] > now_us]
        return here


class Switch:
    """Hosts behind links of one rate, and a switch whose ports drop what does not fit into their queues.

    A host's loop is that of `datagram_loop`: it takes what has arrived, sends what its local queue has room for, rests.
    """

    def __init__(self, ranks, rate_bits_per_s, lose=0.0, queue_bytes=256 * 1024, way_us=50, local=16, seed=0):
        self.ranks, self.lose, self.queue_bytes, self.way_us, self.local = (
            ranks,
            lose,
            queue_bytes,
            way_us,
            local,
        )
        self.bytes_per_us = rate_bits_per_s / 8e6
        self.random = random.Random(seed)
        self.dropped = self.lost = 0
        self.sent_bytes = [0] * ranks
        self._free_us, self._port_free_us = [0.0] * ranks, [0.0] * ranks
        self._queued = [deque() for _ in range(ranks)]
        self._arriving = [[] for _ in range(ranks)]
        self._count = 0

    def room(self, rank, now_us):
        """How many chunks fit into a host's own queue."""
        queued = self._queued[rank]
        while queued and queued[0] <= now_us:
            queued.popleft()
        return max(0, self.local - len(queued))

    def send(self, rank, peer, datagram, now_us):
        size = len(datagram) + HEADERS
        self.sent_bytes[rank] += size
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
        heapq.heappush(self._arriving[peer], (self._port_free_us[peer] + self.way_us, self._count, datagram))

    def arrived(self, rank, now_us, most):
        arriving, here = self._arriving[rank], []
        while arriving and arriving[0][0] <= now_us and len(here) < most:
            here.append(heapq.heappop(arriving)[2])
        return here


def time_of_sums(switch, vectors, bound=0.0, payload=1432, turn_us=400):
    """Sum the vectors, one after the other, in virtual time.

    Args:
        switch: Between the ranks.
        vectors: [rank][number]: mutated.
        bound: As of `Bound`.
        payload: Bytes of a chunk.
        turn_us: Time between two turns of a host's loop.

    Returns:
        Microseconds that each sum took, from the first rank's start to the last one's end; and the endpoints.
    """
    ends = endpoints(switch.ranks, payload=payload)
    mailers = [Mailer(end) for end in ends]
    turns = [(1000 + 37 * rank, rank) for rank in range(switch.ranks)]
    heapq.heapify(turns)
    took_us, now_us = [], 1000
    for number in range(len(vectors[0])):
        begun_us, ended_us = {}, {}
        while len(ended_us) < switch.ranks:
            now_us, rank = heapq.heappop(turns)
            end, mailer = ends[rank], mailers[rank]
            if rank not in begun_us:
                end.begin(vectors[rank][number], Bound(bound), now_us)
                begun_us[rank] = now_us
            here = switch.arrived(rank, now_us, ROWS)
            if here:
                mailer.hand(end, here, now_us)
            while leaving := mailer.take(end, now_us, switch.room(rank, now_us)):
                for peer, datagram in leaving:
                    switch.send(rank, peer, datagram, now_us)
            if end.take_finished():
                ended_us[rank] = now_us
            heapq.heappush(turns, (now_us + turn_us, rank))
            assert now_us < 600_000_000, "it does not end"
        took_us.append(max(ended_us.values()) - min(begun_us.values()))
    return took_us, ends


def strangers(ends):
    """How many datagrams these endpoints took for a stranger's."""
    return sum(int(end.tables.numbers[e.STRANGERS]) for end in ends)
