"""The words at the front of an arena: what a rank tells the others of its host.

    offset     words            written by its owner only
    0          nonce            16 bytes that prove that a peer has mapped this very memory
    64         stage            how often this rank has arrived; only grows (modulo 2^32), peers wait for it to
    128        given_up         0, or 1 + the rank that its owner holds to be lost
    192, 448   notices          what it is about to do, 2 x 32 integers, in turn

A rank is never more than one arrival ahead of the slowest, so two notices suffice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.transports.shared_memory import futex
from paceline.transports.shared_memory.arena import Arena

SIZE_BYTES = 4096
NONCE_BYTES = 16
NOTICE_WORDS = 32
_STAGE, _GIVEN_UP, _NOTICES = 64, 128, 192


class Board:
    """One rank's words, seen from any rank of the host."""

    def __init__(self, arena: Arena) -> None:
        self._nonce = arena.bytes[:NONCE_BYTES]
        self._stage = arena.bytes[_STAGE : _STAGE + 4].view(np.uint32)
        self._given_up = arena.bytes[_GIVEN_UP : _GIVEN_UP + 4].view(np.uint32)
        last = _NOTICES + 2 * NOTICE_WORDS * 8
        self._notices = arena.bytes[_NOTICES:last].view(np.int64).reshape(2, NOTICE_WORDS)
        self._address = arena.address + _STAGE

    @property
    def nonce(self) -> bytes:
        return self._nonce.tobytes()

    def sign(self, nonce: bytes) -> None:
        """Write the proof. Owner only."""
        self._nonce[:] = np.frombuffer(nonce, dtype=np.uint8)

    def write_notice(self, number: int, words: Sequence[int]) -> None:
        """Say what comes after arrival `number`. Owner only, before it arrives."""
        self._notices[number % 2, : len(words)] = words

    def read_notice(self, number: int, num_words: int) -> list[int]:
        """Read what its owner said about arrival `number`."""
        words: list[int] = self._notices[number % 2, :num_words].tolist()
        return words

    def arrive(self, stage: int) -> None:
        """Say that everything before `stage` is done, and wake whoever waits for that. Owner only."""
        futex.fence()
        self._stage[0] = stage % 2**32
        futex.wake(self._address)

    def has_arrived(self, stage: int) -> bool:
        """Whether its owner is at `stage` or beyond."""
        return (int(self._stage[0]) - stage) % 2**32 < 2**31

    def wait_for(self, stage: int, timeout_s: float) -> bool:
        """Wait until its owner is at `stage`, at most `timeout_s`; says whether it is. May return early."""
        seen = int(self._stage[0])
        if (seen - stage) % 2**32 >= 2**31:
            futex.wait_while(self._address, seen, timeout_s)
            return self.has_arrived(stage)
        futex.fence()
        return True

    def give_up(self, lost_rank: int) -> None:
        """Tell the others that this rank will not arrive any more, and because of whom. Owner only."""
        self._given_up[0] = 1 + lost_rank
        futex.wake(self._address)

    @property
    def given_up_because_of(self) -> int | None:
        value = int(self._given_up[0])
        return value - 1 if value else None
