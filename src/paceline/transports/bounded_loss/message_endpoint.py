"""`MessageEndpoint`: one rank's part of reliable messages between pairs of ranks; a `DatagramEnd`.

Rules
1. Messages from one rank to another are numbered, and the k-th that is sent goes into the k-th that is received. The
   two directions of a pair, and other pairs, know nothing of each other.
2. Of each direction of a pair up to `SLOTS` messages are under way; whoever uses this cuts long ones into parts.
3. A tag, equal at both ends, goes with every datagram: one of another tag, or length, writes nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.transports.bounded_loss import endpoint_state as e
from paceline.transports.bounded_loss.datagram_end import DatagramEnd
from paceline.transports.bounded_loss.sending import advance
from paceline.transports.bounded_loss.shards import num_chunks

Ended = tuple[bool, int, int]
"""Whether it was sent from here, the peer, and the message's number in that direction."""


class MessageEndpoint(DatagramEnd):
    """One rank's state of messages. Arguments as of `DatagramEnd`."""

    _held: dict[Ended, NDArray[np.uint8]]  # memory that the tables have addresses of

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._held = {}

    def can_send(self, peer: int) -> bool:
        """Whether there is room for one more message to `peer`."""
        t = self.tables
        return bool(t.outgoing[int(t.peers[peer, e.P_SENDING]) % e.SLOTS, 0, peer, e.O_NUMBER] < 0)

    def can_receive(self, peer: int) -> bool:
        """Whether there is room for one more message from `peer`."""
        t = self.tables
        return bool(t.incoming[int(t.peers[peer, e.P_RECEIVING]) % e.SLOTS, 0, peer, e.I_NUMBER] < 0)

    def begin_send(self, peer: int, memory: NDArray[np.uint8], tag: int) -> int:
        """Begin to send `memory`, shape (N,), N > 0, which must not change until it has ended; return its number."""
        number, slot, chunks = self._enter(peer, memory, e.P_SENDING)
        outgoing = self.tables.outgoing[slot, 0, peer]
        outgoing[:] = 0
        outgoing[e.O_NUMBER], outgoing[e.O_CHUNKS], outgoing[e.O_TAG] = number, chunks, tag
        outgoing[e.O_ADDRESS], outgoing[e.O_BYTES] = memory.ctypes.data, memory.nbytes
        self.tables.chunk_state[slot, 0, peer, :chunks] = e.UNSENT
        self.tables.chunk_class[slot, peer, :chunks] = 0
        outgoing[e.O_ACTIVE] = 1
        self._held[True, peer, number] = memory
        return number

    def begin_receive(self, peer: int, memory: NDArray[np.uint8], tag: int, now_us: int) -> int:
        """Begin to receive into `memory`, shape (N,), N > 0; return the message's number."""
        number, slot, chunks = self._enter(peer, memory, e.P_RECEIVING)
        incoming = self.tables.incoming[slot, 0, peer]
        incoming[:] = 0
        incoming[e.I_CHUNKS], incoming[e.I_TAG] = chunks, tag
        incoming[e.I_ADDRESS], incoming[e.I_BYTES] = memory.ctypes.data, memory.nbytes
        incoming[e.I_NUMBER] = number
        self.tables.have[slot, 0, peer, :chunks] = 0
        self._held[False, peer, number] = memory
        self.tables.peers[peer, e.P_ANSWER] = 1  # its sender may be waiting for this
        self._take_stashed(peer, number, now_us)
        return number

    def go_on(self, now_us: int) -> None:
        advance(self.tables, now_us)

    def take_ended(self) -> list[Ended]:
        """Return the messages that have ended since the last call; their memory is the caller's again."""
        t = self.tables
        found: list[Ended] = []
        sending, receiving = t.outgoing[:, 0], t.incoming[:, 0]
        for slot, peer in np.argwhere((sending[..., e.O_NUMBER] >= 0) & (sending[..., e.O_ACTIVE] == 0)):
            found.append((True, int(peer), int(sending[slot, peer, e.O_NUMBER])))
            sending[slot, peer, e.O_NUMBER] = -1
        for slot, peer in np.argwhere((receiving[..., e.I_NUMBER] >= 0) & (receiving[..., e.I_DONE] > 0)):
            row = receiving[slot, peer]
            found.append((False, int(peer), int(row[e.I_NUMBER])))
            self._answer_later(int(peer), row)
            row[e.I_NUMBER] = -1
        for ended in found:
            del self._held[ended]
        are_used = (sending[..., e.O_NUMBER] >= 0).any(axis=1) | (receiving[..., e.I_NUMBER] >= 0).any(axis=1)
        t.slots[:, e.S_STAGE] = np.where(are_used, e.CARRYING, e.FREE)
        return sorted(found, key=lambda ended: ended[2])

    def let_go_of_memory(self) -> None:
        """Go on with copies of all memory that is held: the callers' is theirs again, also of what has not ended."""
        for (is_sent, peer, number), memory in self._held.items():
            copied = self._held[is_sent, peer, number] = memory.copy()
            rows, column = (
                (self.tables.outgoing, e.O_ADDRESS) if is_sent else (self.tables.incoming, e.I_ADDRESS)
            )
            rows[number % e.SLOTS, 0, peer, column] = copied.ctypes.data

    def forgive_misfit(self) -> None:
        """Take no more notice of a message that did not fit; nothing of it was written."""
        self.tables.numbers[e.MISFIT_PEER] = -1

    def _enter(self, peer: int, memory: NDArray[np.uint8], column: int) -> tuple[int, int, int]:
        """The number of the next message in this direction, its slot, and its chunks, for which there is room then."""
        chunks = int(num_chunks(memory.nbytes, int(self.tables.numbers[e.PAYLOAD])))
        self.tables = e.with_room(self.tables, chunks)
        number = int(self.tables.peers[peer, column])
        self.tables.peers[peer, column] += 1
        slot = number % e.SLOTS
        if self.tables.slots[slot, e.S_STAGE] == e.FREE:
            self.tables.slots[slot, e.S_STAGE] = e.CARRYING
        return number, slot, chunks

    def _answer_later(self, peer: int, row: NDArray[np.int64]) -> None:
        """Keep the DONE of a message that is over and has not been answered, as compiled code does for late ones."""
        t = self.tables
        kept = int(t.peers[peer, e.P_LATE])
        if row[e.I_REPLY] != e.NO_REPLY and kept < e.LATE_REPLIES:
            t.late[peer, kept] = row[e.I_NUMBER], 0
            t.peers[peer, e.P_LATE] = kept + 1
