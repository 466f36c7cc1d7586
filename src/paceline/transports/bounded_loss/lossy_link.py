"""`LossyLink`: sums of vectors over ranks by UDP, of which a bounded part may be lost."""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from paceline.errors import ConfigurationError, ProtocolError
from paceline.host.exit import end_before_exit
from paceline.transports.bounded_loss import datagram_loop as loop
from paceline.transports.bounded_loss import endpoint_state as e
from paceline.transports.bounded_loss.endpoint import Endpoint
from paceline.transports.bounded_loss.link_thread import LINGER_S, LinkThread, silence_s
from paceline.transports.bounded_loss.udp_socket import Met, meet
from paceline.transports.lossy_transport import Bound, LossyTransport, Sum


class LossyLink(LossyTransport):
    """This rank's end of a group of ranks that sum vectors by UDP.

    Limits first: Linux, IPv4. What is lost of one vector is lost for good: see `Bound`.

    Args:
        store: Used for this alone.
        rank: Of this process.
        num_ranks: How many take part.
        timeout: How long a rank waits for another to connect, and for a sum.
        address: Of this host, on which it listens; "" for that of `interface`.
        interface: A network interface, where there is no address.
        num_owners: As of `Endpoint`: 0, or how many ranks sum for all.

    Contract:
        Collective: making one, over these ranks.  Blocks: until every rank has come.

    Raises:
        ConfigurationError: There is no such interface, or it has no IPv4 address.
        PeerLostError: A rank did not come.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        num_ranks: int,
        timeout: timedelta,
        address: str = "",
        interface: str = "",
        num_owners: int = 0,
    ) -> None:
        super().__init__(rank, num_ranks)
        loop.compile_all()
        met = meet(
            store, rank, num_ranks, timeout, address, interface, "connecting to sum gradients over UDP"
        )
        self._driver = _Driver(rank, met, timeout.total_seconds(), num_owners)
        self._let_go = weakref.finalize(self, self._driver.close, 0.0)
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
        """The address and port on which this rank listens."""
        return self._driver.place

    def close(self, timeout_s: float = LINGER_S) -> bool:
        """End the thread, after peers have what they need of this rank; returns whether it has ended."""
        return self._driver.close(timeout_s)


class _Driver(LinkThread):
    """The sums that the thread works on; the link itself may be collected."""

    def __init__(self, rank: int, met: Met, timeout_s: float, num_owners: int) -> None:
        silence_us = int(silence_s(timeout_s) * 1e6)
        self.endpoint = Endpoint(rank, len(met.places), met.keys, met.payload_bytes, silence_us, num_owners)
        super().__init__(self.endpoint, met, timeout_s, f"paceline lossy link of rank {rank}")
        self._queue: deque[Sum] = deque()
        self._launched: dict[int, Sum] = {}

    def submit(self, launched: Sum) -> None:
        with self._lock:
            if self._usable():
                self._queue.append(launched)
                os.eventfd_write(self._wake, 1)
                return
        launched.end(None, self._failure)

    def _begin(self) -> None:
        while self._queue and self.endpoint.can_begin:
            launched = self._queue.popleft()
            number = self.endpoint.begin(launched.vector, launched.bound, time.monotonic_ns() // 1000)
            self._launched[number] = launched

    def _end(self) -> None:
        if not self._launched:
            return
        for finished in self.endpoint.take_finished():
            self._launched.pop(finished.collective).end(finished)

    def _is_under_way(self) -> bool:
        return bool(self._launched or self._queue)

    def _check(self) -> None:
        misfit = self.endpoint.misfit_peer
        if misfit is not None:
            raise ProtocolError(
                f"rank {self._rank} and rank {misfit} sum vectors of different lengths. Every rank launches the same "
                "sums in the same order; another model, or another bucket size, on one of them causes this."
            )
        oldest = min(self._launched, default=None)
        if oldest is not None and time.monotonic() - self._launched[oldest].launched_s > self._timeout_s:
            raise self._unheard(self._awaited(oldest), self._timeout_s)

    def _awaited(self, collective: int) -> int:
        """The first peer whose part of a collective is not here."""
        incoming = self.endpoint.tables.incoming[collective % e.SLOTS]
        for phase in range(2):
            for peer in range(self.endpoint.num_ranks):
                if peer != self._rank and not incoming[phase, peer, e.I_DONE]:
                    return peer
        return (self._rank + 1) % self.endpoint.num_ranks

    def _give_up(self, error: Exception) -> None:
        with self._lock:
            waiting = [*self._launched.values(), *self._queue]
            self._launched.clear()
            self._queue.clear()
        for launched in waiting:
            launched.end(None, error)
