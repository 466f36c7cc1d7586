"""`DatagramTransport`: messages between ranks by UDP, of which nothing is lost; a `Transport` beside Gloo's TCP.

What was lost is repeated selectively, and the rate follows the path's delay, as with sums of bounded loss.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import PeerLostError, ProtocolError
from paceline.host.exit import end_before_exit
from paceline.transports.bounded_loss import datagram_loop as loop
from paceline.transports.bounded_loss import endpoint_state as e
from paceline.transports.bounded_loss.link_thread import LINGER_S, LinkThread
from paceline.transports.bounded_loss.message_endpoint import Ended, MessageEndpoint
from paceline.transports.bounded_loss.udp_socket import Met
from paceline.transports.transport import Message, Transport

PART_BYTES = 1 << 20
_QUIET_S = 0.2  # a busy machine may let a peer wait for so long
_PAUSES = 3.5  # between ENDs, each of which is up to twice the last: so one may be lost
_MOST_TAG = (1 << 32) - 1


class DatagramTransport(Transport):
    """This rank's end.

    Limits first: Linux, IPv4.

    Args:
        rank: Of this process.
        met: What it knows of the others; its sockets are this object's.
        timeout: A rank that is needed and silent for so long is lost.
    """

    def __init__(self, rank: int, met: Met, timeout: timedelta) -> None:
        super().__init__(rank, len(met.places))
        loop.compile_all()
        self._driver = _Driver(rank, met, timeout.total_seconds())
        self._let_go = weakref.finalize(self, self._driver.close, 0.0)
        end_before_exit(self, DatagramTransport.close)
        self._driver.thread.start()

    @property
    def payload_bytes(self) -> int:
        """What the longest datagram carries."""
        return self._driver.payload_bytes

    @property
    def counters(self) -> dict[str, int]:
        """Datagrams of this rank: sent, repeated, those of strangers that were dropped, and others. Local."""
        return self._driver.counters

    @property
    def place(self) -> tuple[str, int]:
        """The address and port on which this rank listens."""
        return self._driver.place

    def close(self, timeout_s: float = LINGER_S) -> bool:
        """End the thread, after peers have what they need of this rank; returns whether it has ended."""
        return self._driver.close(timeout_s)

    def _exchange(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        timeout_s: float,
        on_received: Callable[[int], None],
    ) -> None:
        until_s = time.monotonic() + timeout_s
        coming = [_Carried(False, peer, tensor) for peer, tensor in receives]
        going = [_Carried(True, peer, tensor) for peer, tensor in sends]
        try:
            self._driver.hand_in([*coming, *going])
            for index, carried in enumerate(coming):
                self._driver.wait(carried, until_s, timeout_s)
                on_received(index)
            for carried in going:
                self._driver.wait(carried, until_s, timeout_s)
        except BaseException:
            self._driver.let_go()
            raise


class _Carried:
    """A message, and those of its parts that have not begun, and not ended."""

    def __init__(self, is_sent: bool, peer: int, tensor: Tensor) -> None:
        self.is_sent = is_sent
        self.peer = peer
        memory: NDArray[np.uint8] = tensor.detach().view(torch.uint8).numpy()
        parts = [memory[at : at + PART_BYTES] for at in range(0, memory.nbytes, PART_BYTES)]
        # What is left of the message after this part: so messages of other sizes never fit.
        self.waiting = deque(
            (part, (memory.nbytes - i * PART_BYTES) & _MOST_TAG) for i, part in enumerate(parts)
        )
        self.num_left = len(parts)

    def let_go_of_memory(self) -> None:
        """Go on with copies of the parts that have not begun."""
        self.waiting = deque((part.copy(), tag) for part, tag in self.waiting)


class _Driver(LinkThread):
    """The messages that the thread works on; the transport itself may be collected."""

    def __init__(self, rank: int, met: Met, timeout_s: float) -> None:
        silence_us = int(timeout_s * 1e6)
        ranks = len(met.places)
        self.endpoint = MessageEndpoint(rank, ranks, met.keys, met.payload_bytes, silence_us)
        super().__init__(self.endpoint, met, timeout_s, f"paceline datagrams of rank {rank}")
        self.payload_bytes = met.payload_bytes
        self._changed = threading.Condition(self._lock)
        # To each peer, and from each, in order.
        self._waiting: dict[tuple[bool, int], deque[_Carried]] = {
            (is_sent, peer): deque() for is_sent in (False, True) for peer in range(ranks)
        }
        self._part_of: dict[Ended, _Carried] = {}
        self._misfits: set[int] = set()
        self._is_to_let_go = self._is_over = False
        self._heard, self._heard_s = -1, 0.0

    def hand_in(self, messages: Sequence[_Carried]) -> None:
        """Let messages be carried, after all that were handed in before."""
        with self._lock:
            if not self._usable():
                assert self._failure is not None
                raise self._failure
            for carried in messages:
                self._waiting[carried.is_sent, carried.peer].append(carried)
            os.eventfd_write(self._wake, 1)

    def wait(self, carried: _Carried, until_s: float, timeout_s: float) -> None:
        """Wait for a message; the error names the peer that did not send or take it in time."""
        with self._changed:
            while carried.num_left:
                if carried.peer in self._misfits:
                    raise ProtocolError(
                        f"rank {self._rank} and rank {carried.peer} exchange messages of different sizes: they are in "
                        "different collectives."
                    )
                if self._failure is not None:
                    raise self._failure
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise PeerLostError(
                        f"rank {self._rank} heard nothing from rank {carried.peer} for {timeout_s:g} s: it is stuck, "
                        "stopped or unreachable",
                        carried.peer,
                    )
                self._changed.wait(left_s)

    def let_go(self) -> None:
        """After an error: the callers' memory is theirs again; peers still get what was to be sent, as it is now."""
        with self._changed:
            self._is_to_let_go = True
            if not self._is_over:
                os.eventfd_write(self._wake, 1)
            while self._is_to_let_go and not self._is_over:
                self._changed.wait()

    def _begin(self) -> None:
        with self._changed:
            if self._is_to_let_go:
                self.endpoint.let_go_of_memory()
                for carried in {
                    id(each): each for queue in self._waiting.values() for each in queue
                }.values():
                    carried.let_go_of_memory()
                self._is_to_let_go = self._is_over = False
                self._changed.notify_all()
            for (is_sent, peer), queue in self._waiting.items():
                while queue and (
                    self.endpoint.can_send(peer) if is_sent else self.endpoint.can_receive(peer)
                ):
                    carried = queue[0]
                    memory, tag = carried.waiting.popleft()
                    if is_sent:
                        number = self.endpoint.begin_send(peer, memory, tag)
                    else:
                        number = self.endpoint.begin_receive(peer, memory, tag, time.monotonic_ns() // 1000)
                    self._part_of[is_sent, peer, number] = carried
                    if not carried.waiting:
                        queue.popleft()

    def _end(self) -> None:
        if not self._part_of:
            return
        ended = self.endpoint.take_ended()
        if ended:
            with self._changed:
                for which in ended:
                    self._part_of.pop(which).num_left -= 1
                self._changed.notify_all()

    def _is_under_way(self) -> bool:
        return bool(self._part_of) or any(self._waiting.values())

    def _check(self) -> None:
        misfit = self.endpoint.misfit_peer
        if misfit is not None:
            self.endpoint.forgive_misfit()
            with self._changed:  # only who waits for this peer is told: others may learn something better
                self._misfits.add(misfit)
                self._changed.notify_all()

    def _is_quiet(self) -> bool:
        """Whether peers have been quiet for longer than two of their ENDs are apart.

        Else one may not know that its last message arrived, and would ask nobody.
        """
        t = self.endpoint.tables
        heard = int(t.ways[:, e.W_RX_COUNT].sum() + t.numbers[e.REPLAYED] + t.numbers[e.STALE])
        if heard != self._heard:
            self._heard, self._heard_s = heard, time.monotonic()
        quiet_s = max(_QUIET_S, _PAUSES * float(t.peers[:, e.P_PAUSE].max()) / 1e6)
        return time.monotonic() - self._heard_s > quiet_s

    def _give_up(self, error: Exception) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
