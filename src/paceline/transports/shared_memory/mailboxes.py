"""A transport between the ranks of one host: messages through slots in memory that they share.

Rules
1. Every rank has a ring buffer for each other rank in its arena: a few slots, and two counters. A message is cut into
   parts of a slot's size; the sender fills a free slot and counts it as posted, the receiver empties it and counts it
   as taken. Sender and receiver never wait for a third rank.
2. Messages between two ranks arrive in order. With a slot goes the length of its whole message; a receiver that
   expects another length raises.
3. A rank that can do nothing sleeps on its doorbell, a word that a peer changes after posting or taking. Two peers may
   change it at once and count only one; a sleeper checks all buffers after reading the doorbell and before sleeping on
   what it read, so nothing is missed.
4. Who waits checks every `SLICE_S` whether those it waits for are alive and have not given up.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.errors import PeerLostError, ProtocolError
from paceline.host.processes import GONE, start_time_of, state_of
from paceline.transports.shared_memory import futex
from paceline.transports.shared_memory.arena import Place
from paceline.transports.shared_memory.barrier import PATIENCE_S, SLICE_S
from paceline.transports.shared_memory.neighbours import Host, Neighbour
from paceline.transports.transport import Message, Transport

NUM_SLOTS = 4
SLOT_BYTES = 256 * 1024
_WORDS_BYTES = 64  # a cache line
_BUFFER_BYTES = _WORDS_BYTES * 3 + NUM_SLOTS * SLOT_BYTES
_MODULUS = 2**32


class _RingBuffer:
    """The ring buffer of what one rank sends to another; used by both."""

    def __init__(self, bytes_: Tensor) -> None:
        words = bytes_.numpy()
        self._posted = words[:4].view("uint32")
        self._taken = words[_WORDS_BYTES : _WORDS_BYTES + 4].view("uint32")
        self._lengths = words[2 * _WORDS_BYTES : 2 * _WORDS_BYTES + 8 * NUM_SLOTS].view("int64")
        self._slots = bytes_[3 * _WORDS_BYTES :].view(NUM_SLOTS, SLOT_BYTES)

    def num_waiting(self) -> int:
        """Parts that are posted and not taken."""
        return (int(self._posted[0]) - int(self._taken[0])) % _MODULUS

    def post(self, part: Tensor, length: int) -> None:
        """Fill a free slot. Sender only."""
        slot = int(self._posted[0]) % NUM_SLOTS
        self._slots[slot, : part.numel()].copy_(part)
        self._lengths[slot] = length
        futex.fence()
        self._posted[0] = (int(self._posted[0]) + 1) % _MODULUS

    def length(self) -> int:
        """Of the whole message that the next part belongs to. Receiver only."""
        futex.fence()
        return int(self._lengths[int(self._taken[0]) % NUM_SLOTS])

    def take(self, part: Tensor) -> None:
        """Empty the next slot. Receiver only."""
        slot = int(self._taken[0]) % NUM_SLOTS
        part.copy_(self._slots[slot, : part.numel()])
        futex.fence()
        self._taken[0] = (int(self._taken[0]) + 1) % _MODULUS


class _Doorbell:
    """A futex word on which a rank sleeps, and its peers wake it."""

    def __init__(self, bytes_: Tensor) -> None:
        self._word = bytes_.numpy()[:4].view("uint32")
        self._address = self._word.ctypes.data

    def read(self) -> int:
        value = int(self._word[0])
        futex.fence()
        return value

    def ring(self) -> None:
        futex.fence()
        self._word[0] = (int(self._word[0]) + 1) % _MODULUS
        futex.wake(self._address)

    def sleep(self, seen: int, timeout_s: float) -> None:
        futex.wait_while(self._address, seen, timeout_s)


class SharedMemoryTransport(Transport):
    """Messages between the ranks of `host`, which are all there are.

    The host was made for this transport: nothing has been allocated in its arenas yet.
    """

    def __init__(self, host: Host) -> None:
        super().__init__(host.me.rank, host.num_ranks)
        self._host = host
        num_bytes = _WORDS_BYTES + host.num_ranks * _BUFFER_BYTES
        self._mine = host.me.arena.allocate(num_bytes, torch.uint8)
        place = host.me.arena.place_of(self._mine)
        assert place is not None
        areas = [
            neighbour.arena.tensor(Place(place.start, num_bytes), torch.uint8)
            for neighbour in host.neighbours
        ]
        self._doorbells = [_Doorbell(area[:_WORDS_BYTES]) for area in areas]
        self._outgoing = [
            _RingBuffer(_buffer_bytes(areas[self.rank], peer)) for peer in range(host.num_ranks)
        ]
        self._incoming = [_RingBuffer(_buffer_bytes(area, self.rank)) for area in areas]
        self._starts = [start_time_of(neighbour.pid) for neighbour in host.neighbours]
        self._patience_s = PATIENCE_S if host.num_ranks <= len(os.sched_getaffinity(0)) else 0.0

    def _exchange(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        timeout_s: float,
        on_received: Callable[[int], None],
    ) -> None:
        exchange = _Exchange(self._outgoing, self._incoming, self._doorbells, sends, receives)
        doorbell, deadline_s, num_told = self._doorbells[self.rank], time.monotonic() + timeout_s, 0
        next_check_s = idle_since_s = time.monotonic()
        try:
            while not exchange.is_over:
                seen = doorbell.read()
                has_moved = exchange.move()
                while num_told < len(receives) and exchange.is_received[num_told]:
                    on_received(num_told)
                    num_told += 1
                now_s = time.monotonic()
                if has_moved:
                    idle_since_s = now_s
                elif now_s - idle_since_s < self._patience_s:
                    futex.let_threads_run()
                else:
                    doorbell.sleep(seen, min(SLICE_S, max(deadline_s - now_s, 0.0)))
                if now_s >= min(next_check_s, deadline_s):
                    next_check_s = now_s + SLICE_S
                    self._check_peers(exchange.awaited, timeout_s if now_s >= deadline_s else None)
        except BaseException as error:
            lost = error.peer if isinstance(error, PeerLostError) else None
            self._host.me.status.give_up(self.rank if lost is None else lost)
            raise

    def _check_peers(self, awaited: Sequence[int], timeout_s: float | None) -> None:
        """Raise if a peer in `awaited` is gone; with a `timeout_s`, which has passed, if there is any peer in it."""
        for peer in awaited:
            neighbour = self._host.neighbours[peer]
            if self._incoming[peer].num_waiting():
                continue  # what it sent before is still to be received
            if neighbour.status.given_up_because_of is not None:  # its process may have ended for that reason
                raise PeerLostError(f"rank {self.rank} lost rank {peer}, which gave up", peer)
            if self._is_gone(neighbour):
                raise PeerLostError(
                    f"rank {self.rank} lost rank {peer} (process {neighbour.pid}), which died", peer
                )
        if timeout_s is not None and awaited:
            raise PeerLostError(
                f"rank {self.rank} heard nothing from rank {awaited[0]} for {timeout_s:g} s: it is stuck or stopped",
                awaited[0],
            )

    def _is_gone(self, neighbour: Neighbour) -> bool:
        return state_of(neighbour.pid) == GONE or start_time_of(neighbour.pid) != self._starts[neighbour.rank]


class _Exchange:
    """One exchange under way."""

    def __init__(
        self,
        outgoing: Sequence[_RingBuffer],
        incoming: Sequence[_RingBuffer],
        doorbells: Sequence[_Doorbell],
        sends: Sequence[Message],
        receives: Sequence[Message],
    ) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._doorbells = doorbells
        self._to_post: dict[int, deque[tuple[Tensor, int]]] = {}
        for peer, tensor in sends:
            parts = self._to_post.setdefault(peer, deque())
            parts.extend((part, tensor.nbytes) for part in _parts(tensor))
        self._to_take: dict[int, deque[tuple[Tensor, int, int | None]]] = {}
        for index, (peer, tensor) in enumerate(receives):
            queue = self._to_take.setdefault(peer, deque())
            *most, last = _parts(tensor)
            queue.extend((part, tensor.nbytes, None) for part in most)
            queue.append((last, tensor.nbytes, index))
        self.is_received = [False] * len(receives)

    @property
    def is_over(self) -> bool:
        return not any(self._to_post.values()) and not any(self._to_take.values())

    @property
    def awaited(self) -> list[int]:
        """Peers that have something to do for us to go on."""
        return [peer for queues in (self._to_take, self._to_post) for peer, queue in queues.items() if queue]

    def move(self) -> bool:
        """Post and take what can be; whether anything could."""
        has_moved = False
        for peer, parts in self._to_post.items():
            buffer = self._outgoing[peer]
            if parts and buffer.num_waiting() < NUM_SLOTS:
                buffer.post(*parts.popleft())
                self._doorbells[peer].ring()
                has_moved = True
        for peer, queue in self._to_take.items():
            buffer = self._incoming[peer]
            if queue and buffer.num_waiting():
                part, length, index = queue.popleft()
                if buffer.length() != length:
                    raise ProtocolError(
                        f"a message of {buffer.length()} bytes came from rank {peer} where one of {length} was "
                        "expected. The ranks are not in the same collective, or have tensors of different sizes"
                    )
                buffer.take(part)
                self._doorbells[peer].ring()
                has_moved = True
                if index is not None:
                    self.is_received[index] = True
        return has_moved


def _buffer_bytes(area: Tensor, receiver: int) -> Tensor:
    first = _WORDS_BYTES + receiver * _BUFFER_BYTES
    return area[first : first + _BUFFER_BYTES]


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = tensor.view(torch.uint8).split(SLOT_BYTES)
    return parts
