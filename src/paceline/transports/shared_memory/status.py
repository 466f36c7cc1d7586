"""The status words at the front of an arena: what a rank tells the others of its host outside any message.

    offset     words            written by their owner only
    0          nonce            16 random bytes, by which a peer checks that it has mapped this very memory
    64         arrivals         at how many barriers its owner has arrived, modulo 2^32; peers wait for it to grow
    128        given_up         0, or 1 + the rank that its owner considers lost, or that its owner has left
    192, 2112  announcements    integers for the ranks that meet at a barrier: for even and for odd numbers, 240 each

A rank is never more than one barrier ahead of the slowest, so two announcements suffice.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from paceline.transports.shared_memory import futex
from paceline.transports.shared_memory.arena import Arena

SIZE_BYTES = 4096
NONCE_BYTES = 16
NUM_ANNOUNCED = 240
_ROW_BYTES = 8 * NUM_ANNOUNCED
_HAS_LEFT = 2**32 - 1
_ARRIVALS, _GIVEN_UP, _ANNOUNCEMENTS = 64, 128, 192


class Status:
    """One rank's status, read and written from any rank of the host."""

    def __init__(self, arena: Arena) -> None:
        # Views that Python reads and writes in a third of the time that an array's element takes.
        self._arrivals = arena.bytes[_ARRIVALS : _ARRIVALS + 4].data.cast("I")
        self._given_up = arena.bytes[_GIVEN_UP : _GIVEN_UP + 4].data.cast("I")
        self._announcements = arena.bytes[_ANNOUNCEMENTS : _ANNOUNCEMENTS + 2 * _ROW_BYTES].data
        self._address = arena.address + _ARRIVALS

    def announce(self, barrier: int, integers: Sequence[int]) -> None:
        """Write what the ranks may read after barrier number `barrier`. Owner only, before it arrives there."""
        struct.pack_into(f"={len(integers)}q", self._announcements, barrier % 2 * _ROW_BYTES, *integers)

    def announced(self, barrier: int, num_integers: int) -> list[int]:
        """Return what its owner has announced for barrier number `barrier`."""
        return list(struct.unpack_from(f"={num_integers}q", self._announcements, barrier % 2 * _ROW_BYTES))

    def arrive(self, barrier: int) -> None:
        """Publish everything written before, arrive at barrier number `barrier` and wake who waits. Owner only."""
        futex.fence()
        self._arrivals[0] = barrier % 2**32
        futex.wake(self._address)

    def has_arrived(self, barrier: int) -> bool:
        """Whether its owner is at barrier number `barrier` or beyond."""
        return (self._arrivals[0] - barrier) % 2**32 < 2**31

    def wait_for(self, barrier: int, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until its owner has arrived; returns whether it has. May return early."""
        seen = self._arrivals[0]
        if (seen - barrier) % 2**32 >= 2**31:
            futex.wait_while(self._address, seen, timeout_s)
            return self.has_arrived(barrier)
        futex.fence()
        return True

    def give_up(self, lost_rank: int) -> None:
        """Tell the others that this rank will not arrive any more, and which rank it considers lost. Owner only."""
        self._given_up[0] = 1 + lost_rank
        futex.wake(self._address)

    @property
    def given_up_because_of(self) -> int | None:
        value = self._given_up[0]
        return value - 1 if value not in {0, _HAS_LEFT} else None

    def leave(self) -> None:
        """Tell the others that this rank's program ended, or destroyed the group, of its own accord. Owner only."""
        if not self._given_up[0]:
            self._given_up[0] = _HAS_LEFT
            futex.wake(self._address)

    @property
    def has_left(self) -> bool:
        """Whether its owner left, without an error of the group."""
        return self._given_up[0] == _HAS_LEFT
