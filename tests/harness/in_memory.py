"""Ranks as threads of one process, and a transport between them: exact, quick, and with faults on request.

For tests of what is performed over a transport.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import Any

import torch
from torch import Tensor

from paceline.errors import PeerLostError, ProtocolError
from paceline.transports.transport import Message, Transport

Route = tuple[int, int, int]
"""Source, target and number of bytes."""


class InMemoryNetwork:
    """A network that joins `num_ranks` in-memory transports.

    A message that its sender changes before its exchange is over is an error. Faults on request: `lose` a rank,
    `delay` messages from one rank to another.
    """

    def __init__(self, num_ranks: int) -> None:
        self.transports = [InMemoryTransport(self, rank, num_ranks) for rank in range(num_ranks)]
        self._arrived = Condition()
        self._messages: defaultdict[Route, deque[Tensor]] = defaultdict(deque)
        self._delayed: dict[tuple[int, int], tuple[int, list[Tensor]]] = {}
        self._lost: set[int] = set()

    def run(self, function: Callable[[InMemoryTransport], Any]) -> list[Any]:
        """Call `function` with every transport, each on a thread. Return results or exceptions by rank."""
        with ThreadPoolExecutor(len(self.transports)) as threads:
            futures = [threads.submit(function, transport) for transport in self.transports]
            return [future.exception() or future.result() for future in futures]

    def lose(self, rank: int) -> None:
        """Drop everything that `rank` sends from now on."""
        self._lost.add(rank)

    def delay(self, source: int, target: int, num_messages: int) -> None:
        """Hold messages from `source` to `target` until there are `num_messages` of them, then deliver all."""
        self._delayed[source, target] = num_messages, []

    def deliver(self, source: int, target: int, tensor: Tensor) -> None:
        """Take a message from `source`."""
        if source in self._lost:
            return
        with self._arrived:
            num_messages, under_way = self._delayed.get((source, target), (1, []))
            under_way.append(tensor)
            if len(under_way) < num_messages:
                return
            self._delayed.pop((source, target), None)
            for message in under_way:
                self._messages[source, target, message.nbytes].append(message)
            self._arrived.notify_all()

    def take(self, route: Route, timeout_s: float) -> Tensor | None:
        """Return the oldest message of `route`, waiting for it if necessary; None after the timeout."""
        with self._arrived:
            queue = self._messages[route]
            return queue.popleft() if self._arrived.wait_for(lambda: queue, timeout_s) else None


class InMemoryTransport(Transport):
    """One rank's end of an `InMemoryNetwork`."""

    def __init__(self, network: InMemoryNetwork, rank: int, num_ranks: int) -> None:
        super().__init__(rank, num_ranks)
        self._network = network

    def _exchange(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        timeout_s: float,
        on_received: Callable[[int], None],
    ) -> None:
        deadline = time.monotonic() + timeout_s
        copies = [tensor.clone() for _, tensor in sends]
        for (peer, _), copy in zip(sends, copies, strict=True):
            self._network.deliver(self.rank, peer, copy)
        for index, (peer, tensor) in enumerate(receives):
            received = self._network.take((peer, self.rank, tensor.nbytes), deadline - time.monotonic())
            if received is None:
                raise PeerLostError(
                    f"rank {self.rank} waited {timeout_s:g} s for {tensor.nbytes} bytes from rank {peer}, "
                    "which did not send them",
                    peer,
                )
            tensor.copy_(received.view(tensor.dtype))
            on_received(index)
        for (peer, tensor), copy in zip(sends, copies, strict=True):
            if not torch.equal(tensor.view(torch.uint8), copy.view(torch.uint8)):
                raise ProtocolError(
                    f"rank {self.rank} changed a message while it was on its way to rank {peer}"
                )
