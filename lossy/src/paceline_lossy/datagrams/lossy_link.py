"""`LossyLink`: sums of vectors over ranks by UDP, of which a bounded part may be lost."""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigurationError, ProtocolError
from paceline.host.exit import end_before_exit
from paceline_lossy.datagrams import datagram_loop as loop
from paceline_lossy.datagrams import endpoint_state as e
from paceline_lossy.datagrams.endpoint import Endpoint
from paceline_lossy.datagrams.link_thread import LINGER_S, LinkThread
from paceline_lossy.datagrams.udp_socket import Members
from paceline_lossy.lossy_transport import Bound, Losses, LossyTransport, Sum, joined

PART_BYTES = 1 << 20
MOST_PARTS = 8
"""Longer vectors are summed in parts: while the sums of one part are sent out, the next part is collected. All parts
are under way at once, and each costs the interpreter some hundred microseconds."""


class LossyLink(LossyTransport):
    """This rank's end of a group of ranks that sum vectors by UDP.

    Limits first: it needs Linux and IPv4. A lost part is not repeated: see `Bound`.

    Args:
        rank: The rank of this process.
        members: The addresses and keys of the others. This object closes the sockets in it.
        timeout: How long a rank waits for a sum.
        num_servers: How many of the first ranks sum for the others; 0 if all ranks sum.
    """

    def __init__(self, rank: int, members: Members, timeout: timedelta, num_servers: int = 0) -> None:
        super().__init__(rank, len(members.places))
        loop.compile_all()
        self._driver = _Driver(rank, members, timeout.total_seconds(), num_servers)
        self._finalizer = weakref.finalize(self, self._driver.close, 0.0)
        end_before_exit(self, LossyLink.close)
        self._driver.thread.start()

    def launch(self, vector: NDArray[Any], bound: Bound) -> Sum:
        """Start replacing `vector` by the sum over the ranks.

        Args:
            vector: Shape (N,), N > 0, float32 or float64, contiguous; mutated until the result is done.
            bound: What may be lost; the same on every rank.

        Contract:
            Collective: every rank, same order, the same N and dtype.  Blocks: no.
        """
        if vector.dtype not in (np.float32, np.float64) or not vector.flags.c_contiguous or vector.ndim != 1:
            raise ConfigurationError(
                f"a vector to be summed is one-dimensional, contiguous, float32 or float64, not {vector.dtype} of "
                f"shape {vector.shape}."
            )
        launched = Sum(vector, bound)
        self._driver.submit(launched)
        return launched

    @property
    def counters(self) -> dict[str, int]:
        return self._driver.counters

    @property
    def place(self) -> tuple[str, int]:
        """Return the address and port on which this rank listens."""
        return self._driver.place

    def close(self, timeout_s: float = LINGER_S) -> bool:
        """End the thread, after peers have what they need from this rank. Return whether it has ended."""
        return self._driver.close(timeout_s)


@dataclass
class _Launched:
    """A sum that was launched, and how many of its parts have not finished."""

    sum: Sum
    num_left: int
    finished: list[tuple[int, Losses]] = field(default_factory=list)  # with the part's first element

    def take(self, first: int, losses: Losses) -> None:
        self.finished.append((first, losses))
        self.num_left -= 1
        if self.num_left == 0:
            self.sum.end(joined(sorted(self.finished, key=lambda part: part[0])))


class _Driver(LinkThread):
    """The sums that the thread works on. It holds no reference to the link, so an unused link can be collected."""

    def __init__(self, rank: int, members: Members, timeout_s: float, num_servers: int) -> None:
        silence_us = int(timeout_s * 1e6)
        ranks, ports = len(members.places), len(members.sockets)
        self.endpoint = Endpoint(
            rank, ranks, members.keys, members.payload_bytes, silence_us, num_servers, ports
        )
        super().__init__(self.endpoint, members, timeout_s, f"paceline lossy link of rank {rank}")
        self._queue: deque[tuple[_Launched, int, int]] = deque()  # parts: first element, and end
        self._launched: dict[int, tuple[_Launched, int]] = {}

    def submit(self, launched: Sum) -> None:
        with self._lock:
            if self._usable():
                cuts = _cuts(launched)
                whole = _Launched(launched, len(cuts) - 1)
                self._queue.extend((whole, *pair) for pair in pairwise(cuts))
                os.eventfd_write(self._wake, 1)
                return
        launched.end(None, self._failure)

    def _begin(self) -> None:
        while self._queue and self.endpoint.can_begin:
            whole, first, end = self._queue.popleft()
            now_us = time.monotonic_ns() // 1000
            number = self.endpoint.begin(whole.sum.vector[first:end], whole.sum.bound, now_us)
            self._launched[number] = whole, first

    def _end(self) -> None:
        if not self._launched:
            return
        for finished in self.endpoint.take_finished():
            whole, first = self._launched.pop(finished.collective)
            whole.take(first, finished)

    def _is_under_way(self) -> bool:
        return bool(self._launched or self._queue)

    def _check(self) -> None:
        misfit = self.endpoint.misfit_peer
        if misfit is not None:
            raise ProtocolError(
                f"{self._name} and {self._members.name_of(misfit)} sum vectors of different lengths. Every rank "
                "launches the same sums in the same order; another model, or another bucket size, on one of them "
                "causes this."
            )
        oldest = min(self._launched, default=None)
        if oldest is not None and self._has_waited(self._launched[oldest][0].sum):
            peer, unreached_s = self._awaited(oldest), 0.75 * self._timeout_s
            # On a slow machine or path this comes before the endpoint has repeated enough to call the peer stuck.
            if self.end.is_unreached(peer, time.monotonic_ns() // 1000, int(unreached_s * 1e6)):
                raise self._unreached(peer, unreached_s)
            raise self._unheard(peer, self._timeout_s)

    def _has_waited(self, launched: Sum) -> bool:
        return time.monotonic() - launched.launched_s > self._timeout_s

    def _awaited(self, collective: int) -> int:
        """Return the first peer whose part of a collective is missing."""
        incoming = self.endpoint.tables.incoming[collective % e.SLOTS]
        for phase in range(2):
            for peer in range(self.endpoint.num_ranks):
                if peer != self._rank and not incoming[phase, peer, e.I_DONE]:
                    return peer
        return (self._rank + 1) % self.endpoint.num_ranks

    def _give_up(self, error: Exception) -> None:
        with self._lock:
            wholes = [whole for whole, _ in self._launched.values()]
            wholes += [whole for whole, *_ in self._queue]
            self._launched.clear()
            self._queue.clear()
        for launched in {id(whole): whole.sum for whole in wholes}.values():
            launched.end(None, error)


def _cuts(launched: Sum) -> list[int]:
    """Return the bounds of a vector's parts. A vector with a priority is one part, so urgent ones can overtake it."""
    elements = len(launched.vector)
    if launched.bound.priority:
        return [0, elements]
    per_part = max(PART_BYTES // launched.vector.itemsize, -(-elements // MOST_PARTS))
    return [*range(0, elements, per_part), elements]
