"""`ServerSums`: a rank's end of sums by parameter servers over UDP, of which a bounded part may be lost.

Rules
1. Gradients are pushed, and sums pulled, by datagrams. No part of a pull is lost. Announcements of sums and lost peers
   go over the TCP connections of `ServerLink`.
2. Any error of the datagrams or of the TCP connections ends both. Every sum under way raises it, and so does every
   later one.
3. A server whose datagrams stay away is lost, even if its TCP connection is not. The other servers are told.
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
from paceline_servers.ranks.server_connections import find_addresses
from paceline_servers.response_future import ResponseFuture
from paceline_servers.wire import Frame, Kind, pack, unpack

_NUMBERS = 1 << 32  # a frame's number has 32 bits


class ServerSums(LossyTransport):
    """A rank's end of sums by servers. `num_ranks` counts the ranks, which all push, without the servers.

    Contract:
        Collective over the ranks.  Blocks: until all have come.

    Raises:
        ServerLostError: A server cannot be reached.
        ConfigurationError: A server has another token or version, or no numba; ranks name different servers.
    """

    def __init__(self, addresses: Sequence[str], who: Identity, num_ports: int) -> None:
        super().__init__(who.rank, who.num_ranks)
        self._num_servers = len(addresses)
        self._over_tcp = ServerLink(addresses, who)
        try:
            compile_all()  # before any rank waits for this one
            introduction = Introduction(self._over_tcp.address_of(0), num_ports)
            try:
                announced = self._join(introduction.announcement)
                of_servers = (f"parameter server {number} at {each}" for number, each in enumerate(addresses))
                names = [*of_servers, *(f"rank {rank}" for rank in range(who.num_ranks))]
                members = introduction.members([*announced, *[None] * who.num_ranks], names)
            except BaseException:
                introduction.close()
                raise
        except BaseException:
            self._over_tcp.close(0.0)
            raise
        self._payload_bytes = members.payload_bytes
        timeout = timedelta(seconds=who.timeout_s + GRACE_S)  # a server reports a missing rank itself
        self._link = LossyLink(self._num_servers + who.rank, members, timeout, self._num_servers)
        self._num_launched = 0
        # the servers are told that this rank has left
        self._finalizer = weakref.finalize(self, ServerLink.close, self._over_tcp, 0.0)

    def _join(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Send every server the address of this rank's datagrams. Return their announcements."""
        asked = []
        for number in range(self._num_servers):
            words = own | {"number": number, "servers": self._num_servers}
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
        _SumCompletion(self, self._link.launch(vector, bound), answers, outer)
        return outer

    def by_server(self, losses: Losses) -> Losses:
        """Return the losses as `BoundedLoss` counts them: by server, with sources as ranks."""
        ranges = losses.ranges.copy()
        ranges[:, 0] -= self._num_servers
        missing, expected = losses.missing[: self._num_servers], losses.expected[: self._num_servers]
        return Losses(losses.collective, missing, expected, ranges)

    def with_server(self, error: Exception) -> Exception:
        """Return the error, as a ServerLostError if a server's datagrams stay away. Then tell the other servers."""
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


class _SumCompletion:
    """The completion of a sum: when its datagrams have come, or when either connection has failed."""

    def __init__(self, sums: ServerSums, inner: Sum, answers: ResponseFuture, outer: Sum) -> None:
        self._sums, self._inner, self._answers, self._outer = sums, inner, answers, outer
        self._lock = threading.Lock()
        self._has_ended = False
        inner.on_done(self._end_of_datagrams)
        answers.on_done(self._end_of_answers)

    def _end_of_datagrams(self) -> None:
        try:
            self._inner.wait(0)
        except Exception as error:  # noqa: BLE001  raised in the threads that wait
            self._end(None, self._sums.with_server(error))
            return
        assert self._inner.losses is not None, "it ended well"
        self._end(self._sums.by_server(self._inner.losses), None)

    def _end_of_answers(self) -> None:
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
    """Begin to agree on a name for the connections. The returned function connects this rank to the servers."""
    timeout = timeout_of(process_group)
    store = store_of_job("BoundedLoss")
    name = launch_session_name(process_group, device)

    def connect(group: ProcessGroup) -> LossyTransport:
        session = f"datagrams {name()}"
        prefixed = dist.PrefixStore(f"paceline/servers/{session}", store)
        found = addresses or find_addresses(prefixed, group.rank(), group.size(), timeout)
        who = Identity(
            group.rank(), group.size(), session, timeout.total_seconds(), os.environ.get(TOKEN, "")
        )
        return ServerSums(found, who, paths)

    return connect
