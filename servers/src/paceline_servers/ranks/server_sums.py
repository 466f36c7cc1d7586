"""`ServerSums`: sums by parameter servers over UDP, of which a bounded part may be lost; a rank's end.

Rules
1. Gradients are pushed, and sums pulled, by datagrams: nothing of the pull is lost. What is to be summed, and who is
   gone, is said over the TCP connections of `ServerLink`.
2. Whatever goes wrong on either ends both: every sum under way raises the same, and so does every later one.
3. A server whose datagrams stay away is lost, even if its TCP connection is not; the other servers are told.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from paceline.comm import TOKEN, launch_session_name, store_of_job, timeout_of
from paceline.errors import PeerLostError, ServerLostError
from paceline_lossy import Bound, Introduction, Losses, LossyLink, LossyTransport, Sum, compile_all
from paceline_servers.link import GRACE_S, PATIENCE_S, Identity, ServerLink
from paceline_servers.ranks.server_connections import of_all_launchers
from paceline_servers.response_future import ResponseFuture
from paceline_servers.wire import Frame, Kind, pack, unpack

_NUMBERS = 1 << 32  # that a frame can say


class ServerSums(LossyTransport):
    """A rank's end of sums by servers. `num_ranks` counts ranks, which all push; servers push nothing.

    Contract:
        Collective over the ranks.  Blocks: until all have come.

    Raises:
        ServerLostError: A server cannot be reached.
        ConfigurationError: One has another token or version, or no numba; ranks name different servers.
    """

    def __init__(self, addresses: Sequence[str], who: Identity, num_ports: int) -> None:
        super().__init__(who.rank, who.num_ranks)
        self._num_servers = len(addresses)
        self._over_tcp = ServerLink(addresses, who)
        try:
            compile_all()  # before any rank waits for this one
            introduction = Introduction(self._over_tcp.address_of(0), num_ports)
            cards = self._join(introduction.card)
        except BaseException:
            self._over_tcp.close(0.0)
            raise
        names = [f"parameter server {number} at {address}" for number, address in enumerate(addresses)]
        names += [f"rank {rank}" for rank in range(who.num_ranks)]
        met = introduction.met([*cards, *[None] * who.num_ranks], names)
        self._payload_bytes = met.payload_bytes
        timeout = timedelta(seconds=who.timeout_s + GRACE_S)  # a server that misses a rank says so by itself
        self._link = LossyLink(self._num_servers + who.rank, met, timeout, self._num_servers)
        self._num_launched = 0
        # servers are told that it is gone
        self._let_go = weakref.finalize(self, ServerLink.close, self._over_tcp, 0.0)

    def _join(self, card: dict[str, Any]) -> list[dict[str, Any]]:
        """Tell every server where this rank's datagrams come from; what each says of itself."""
        asked = []
        for number in range(self._num_servers):
            words = card | {"number": number, "servers": self._num_servers}
            asked.append(ResponseFuture(1))
            self._over_tcp.ask(
                number, Frame(Kind.JOIN, body=(pack(words),)), asked[-1], patience_s=PATIENCE_S
            )
        for answers in asked:
            answers.wait()
        return [unpack(answers.bodies[0]) for answers in asked]

    def launch(self, vector: NDArray[Any], bound: Bound) -> Sum:
        number, self._num_launched = self._num_launched, (self._num_launched + 1) % _NUMBERS
        words = {
            "num_elements": len(vector),
            "dtype": str(vector.dtype),
            "payload_bytes": self._payload_bytes,
            "bound": dataclasses.asdict(bound),
        }
        answers = ResponseFuture(self._num_servers)
        frame = Frame(Kind.SUM, number, body=(pack(words),))
        for server in range(self._num_servers):
            self._over_tcp.ask(server, frame, answers)
        outer = Sum(vector, bound)
        _Both(self, self._link.launch(vector, bound), answers, outer)
        return outer

    def shown(self, losses: Losses) -> Losses:
        """As BoundedLoss counts: by server, and sources by their ranks."""
        ranges = losses.ranges.copy()
        ranges[:, 0] -= self._num_servers
        missing, expected = losses.missing[: self._num_servers], losses.expected[: self._num_servers]
        return Losses(losses.collective, missing, expected, ranges)

    def named(self, error: Exception) -> Exception:
        """A server whose datagrams stay away, by its name; the others are told."""
        if not isinstance(error, PeerLostError) or error.peer is None or error.peer >= self._num_servers:
            return error
        lost = ServerLostError(str(error))
        self._over_tcp.give_up(lost)
        return lost

    @property
    def counters(self) -> dict[str, int]:
        return self._link.counters

    def close(self, timeout_s: float) -> bool:
        self._over_tcp.close(0.0)
        return self._link.close(timeout_s)


class _Both:
    """Ends a sum when its datagrams are through, or when either connection has failed."""

    def __init__(self, sums: ServerSums, inner: Sum, answers: ResponseFuture, outer: Sum) -> None:
        self._sums, self._inner, self._answers, self._outer = sums, inner, answers, outer
        self._lock = threading.Lock()
        self._has_ended = False
        inner.on_done(self._carried)
        answers.on_done(self._answered)

    def _carried(self) -> None:
        try:
            self._inner.wait(0)
        except Exception as error:  # noqa: BLE001  it is raised for those who wait
            self._end(None, self._sums.named(error))
            return
        assert self._inner.losses is not None, "it ended well"
        self._end(self._sums.shown(self._inner.losses), None)

    def _answered(self) -> None:
        try:
            self._answers.wait(0)
        except Exception as error:  # noqa: BLE001  as above
            self._end(None, error)

    def _end(self, losses: Losses | None, error: Exception | None) -> None:
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
        self._outer.end(losses, error)


def over_servers(
    process_group: ProcessGroup, device: torch.device, addresses: Sequence[str] | None, paths: int
) -> Callable[[ProcessGroup], LossyTransport]:
    """Launch what the ranks must know of each other; the returned function connects them to the servers."""
    timeout = timeout_of(process_group)
    store = store_of_job("BoundedLoss")
    name = launch_session_name(process_group, device)

    def connect(group: ProcessGroup) -> LossyTransport:
        session = f"datagrams {name()}"
        prefixed = dist.PrefixStore(f"paceline/servers/{session}", store)
        found = addresses or of_all_launchers(prefixed, group.rank(), group.size(), timeout)
        who = Identity(
            group.rank(), group.size(), session, timeout.total_seconds(), os.environ.get(TOKEN, "")
        )
        return ServerSums(found, who, paths)

    return connect
