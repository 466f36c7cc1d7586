"""`DatagramEnd`: one rank's end of the datagram protocol; bytes and times in, bytes and events out.

Rules
1. It opens no socket and reads no clock. Its owner moves the datagrams, and passes the time in microseconds.
2. Every method is quick, and none may be called while another thread is in one.
3. Interpreted code works on batches of datagrams. The work on each datagram is compiled (`receiving`, `sending`).
"""

from __future__ import annotations

import hashlib
import hmac
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline_lossy.datagrams import congestion_window as window
from paceline_lossy.datagrams import datagram as d
from paceline_lossy.datagrams import endpoint_state as e
from paceline_lossy.datagrams.receiving import place, take_datagrams
from paceline_lossy.datagrams.sending import transmit

_FIRST_ROOM = 256
_ANY_NUMBER = 1 << 30
_SILENT_US = 2_000_000


class DatagramEnd(ABC):
    """One rank's state of the protocol.

    Args:
        rank: This rank.
        num_ranks: Number of ranks.
        keys: For every peer 16 secret bytes, which both of the two ranks hold.
        payload_bytes: Bytes that one datagram carries, a multiple of 8; the same on all ranks.
        silence_us: After this time a needed peer that sends nothing is lost.
        num_ports: Number of ports that this rank sends from; the same on all ranks. Networks that choose a path by
            ports then spread one rank's datagrams over several paths, and each carries what it can.

    Attributes:
        tables: The memory, for compiled code.
        room_left: How many more chunks each port would have taken in the last `transmit`; shape (ports,).
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        keys: Mapping[int, bytes],
        payload_bytes: int,
        silence_us: int,
        num_ports: int = 1,
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.num_ports = num_ports
        self.tables = e.new_tables(rank, num_ranks, payload_bytes, d.HEADER_BYTES, _FIRST_ROOM, num_ports)
        self.tables.numbers[e.SILENCE_US] = silence_us
        for peer, secret in keys.items():
            for direction, pair in enumerate(((rank, peer), (peer, rank))):
                of_code, of_hash = _direction_keys(secret, *pair, self.tables.hash_keys[peer, 0].nbytes)
                self.tables.keys[peer, direction] = np.frombuffer(of_code, np.uint64)
                self.tables.hash_keys[peer, direction].reshape(-1)[:] = np.frombuffer(of_hash, np.uint32)
        for way in range(num_ranks * num_ports):
            window.reset(self.tables.ways[way], self.tables.rates[way])
        self.room_left = np.zeros(num_ports, np.int64)

    @property
    def row_bytes(self) -> int:
        """Return the size of the longest datagram."""
        return int(d.HEADER_BYTES + self.tables.numbers[e.PAYLOAD])

    @abstractmethod
    def go_on(self, now_us: int) -> None:
        """Perform the work that compiled code leaves to Python."""

    def receive(
        self, rows: NDArray[np.uint8], sizes: NDArray[Any], marks: NDArray[Any], count: int, now_us: int
    ) -> None:
        """Take the datagrams in the first `count` rows, with their sizes and congestion marks."""
        words, longs = d.words_of(rows)
        take_datagrams(self.tables, rows, words, longs, sizes, marks, count, now_us)
        self.go_on(now_us)

    def transmit(
        self,
        rows: NDArray[np.uint8],
        sizes: NDArray[Any],
        ways: NDArray[Any],
        now_us: int,
        most: int | Sequence[int] = _ANY_NUMBER,
    ) -> int:
        """Write the datagrams that should leave now, one per row, with their sizes and ways; return how many.

        A way is the receiver's number times the number of ports, plus the port. With one port it is the receiver. Each
        port sends at most `most` chunks; a sequence gives one limit per port.
        """
        words, longs = d.words_of(rows)
        self.room_left[:] = most
        count: int = transmit(self.tables, words, longs, sizes, ways, now_us, self.room_left)
        self.go_on(now_us)
        return count

    @property
    def lost_peer(self) -> int | None:
        """Return a peer that is needed and has been silent for too long, if there is one."""
        return self._peer_in(e.LOST_PEER)

    @property
    def stuck_peer(self) -> int | None:
        """Return a peer that is heard but receives no chunk. Larger datagrams are lost on the way to it."""
        return self._peer_in(e.STUCK_PEER)

    def silent_peers(self, now_us: int) -> list[int]:
        """Return the needed peers that have been silent for longer than a computing rank usually is."""
        p = self.tables.peers
        silent = (p[:, e.P_IS_NEEDED] != 0) & (now_us - p[:, e.P_HEARD_AT] > _SILENT_US)
        return [int(peer) for peer in np.flatnonzero(silent) if peer != self.rank]

    def never_reached(self, now_us: int, for_us: int) -> int | None:
        """Return a peer that is heard but has never received a chunk, though some were sent for `for_us`."""
        for peer in range(self.num_ranks):
            never = (self._ways_to(peer)[:, e.W_HAS_DELAY] == 0).all()
            if peer != self.rank and never and self.is_unreached(peer, now_us, for_us):
                return peer
        return None

    def is_unreached(self, peer: int, now_us: int, for_us: int) -> bool:
        """Return whether a peer is heard but has received no chunk for `for_us`, though some were sent."""
        ways = self._ways_to(peer)
        is_tried = (ways[:, e.W_BACKOFF] > 0) & (now_us - ways[:, e.W_STUCK_SINCE] > for_us)
        is_heard = now_us - self.tables.peers[peer, e.P_HEARD_AT] < for_us // 2
        return bool(is_heard and is_tried.all())

    def _ways_to(self, peer: int) -> NDArray[np.int64]:
        ways: NDArray[np.int64] = self.tables.ways[peer * self.num_ports : (peer + 1) * self.num_ports]
        return ways

    @property
    def misfit_peer(self) -> int | None:
        """Return a peer whose transfers have an unexpected size, if there is one."""
        return self._peer_in(e.MISFIT_PEER)

    def has_heard_chunks(self, peer: int) -> bool:
        """Return whether any datagram with a number ever came from a peer."""
        return bool((self._ways_to(peer)[:, e.W_RX_LARGEST] >= 0).any())

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is under way, for this rank or for a peer."""
        return bool((self.tables.slots[:, e.S_STAGE] == e.FREE).all())

    def _peer_in(self, number: int) -> int | None:
        peer = int(self.tables.numbers[number])
        return peer if peer >= 0 else None

    def _take_stashed(self, peer: int, number: int, now_us: int) -> None:
        """Place the datagrams from `peer` that came before this rank began their transfer."""
        t = self.tables
        count = int(t.peers[peer, e.P_STASHED])
        t.peers[peer, e.P_STASHED] = 0
        for entry in range(count):
            row, size = t.stash[peer, entry].copy(), int(t.stash_sizes[peer, entry])
            words = row.view(np.uint32)
            if d.widened(int(words[d.COLLECTIVE]), number) == number:
                place(t, peer, row, words, size, now_us)
            else:
                kept = int(t.peers[peer, e.P_STASHED])
                t.stash[peer, kept, :size] = row[:size]
                t.stash_sizes[peer, kept] = size
                t.peers[peer, e.P_STASHED] = kept + 1


def _direction_keys(secret: bytes, source: int, target: int, hash_bytes: int) -> tuple[bytes, bytes]:
    """Return the key of the datagrams' code, and the key of their payload's hash."""
    both = hmac.new(secret, f"{source} to {target}".encode(), hashlib.sha512).digest()
    return both[:16], hashlib.shake_256(both[16:]).digest(hash_bytes)
