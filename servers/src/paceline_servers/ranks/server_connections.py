"""A rank's connections to the servers of its job: found through c10d's store, opened at the first launch."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from paceline.comm import (
    TOKEN,
    C10dWork,
    ContinuedWork,
    Lane,
    LaneWork,
    Rendezvous,
    host_memory,
    launch_session_name,
    store_of_job,
    timeout_of,
    to_device,
    to_host,
)
from paceline.errors import ConfigurationError
from paceline.reductions import Message
from paceline_servers import SERVERS
from paceline_servers.link import Identity, ServerLink
from paceline_servers.ranks.pieces import Cutting, spans_of
from paceline_servers.response_future import ResponseFuture
from paceline_servers.wire import DType, Frame, Kind

_DTYPES = {
    torch.float32: DType.FLOAT32,
    torch.float64: DType.FLOAT64,
    torch.float16: DType.FLOAT16,
    torch.bfloat16: DType.BFLOAT16,
}
supported = frozenset(_DTYPES)


class ServerConnections:
    """Connections of one model over one process group. Collective: making one, and `launch`; neither blocks."""

    def __init__(
        self,
        process_group: ProcessGroup,  # the ranks; used once, for a broadcast
        parameters: Sequence[Parameter],  # those with gradients to push, in registration order
        device: torch.device,  # of the gradients
        # The servers' addresses. None: every rank names the servers of its launcher, and all are used.
        addresses: Sequence[str] | None,
        # Called once on the lane, when all servers have answered.
        on_open: Callable[[ServerConnections], None],
    ) -> None:
        self._group = process_group
        self._parameters = parameters
        self._addresses = addresses
        self._on_open = on_open
        self._timeout: timedelta = timeout_of(process_group)
        self._store = store_of_job("ParameterServers")
        self._session_name = launch_session_name(process_group, device)
        self._num_pushed = 0
        self._link: ServerLink | None = None
        self._cutting: Cutting | None = None
        self._lane = Lane(f"paceline servers lane of rank {process_group.rank()}")
        self._finalizer = weakref.finalize(self, self._lane.close, 0.0)

    @property
    def link(self) -> ServerLink:
        assert self._link is not None, "on the lane, after `open`"
        return self._link

    @property
    def cutting(self) -> Cutting:
        assert self._cutting is not None, "on the lane, after `open`"
        return self._cutting

    @property
    def is_open(self) -> bool:
        return self._link is not None

    def run(self, perform: Callable[[], None]) -> C10dWork:
        """Run a function on the lane, behind everything that was launched. Does not block."""

        def opened() -> None:
            self._open()
            perform()

        work = LaneWork(opened, [], "parameter_servers")
        self._lane.launch(work, at_once=False)
        return C10dWork(work)

    def launch(
        self, message: Message, answer: Tensor, before: Callable[[], None] | None = None
    ) -> ContinuedWork:
        """Start to push a bucket and to pull its answer. Collective; does not block.

        The body must not change until `answer`, which may be the body, holds the servers' answers. `before` runs first,
        on the lane.
        """
        body = message.body
        on_host = answer

        def begin() -> ResponseFuture:
            nonlocal on_host
            self._open()
            if before is not None:
                before()
            sent = body.detach()
            if not body.is_cpu:
                sent, on_host = to_host(sent), host_memory(body)
            return self._push(message, sent, on_host)

        def finish() -> None:
            if on_host is not answer:
                to_device(answer, on_host)

        return ContinuedWork(self._lane, begin, [body], "parameter_servers", finish)

    def _push(self, message: Message, body: Tensor, answer: Tensor) -> ResponseFuture:
        """Hand a bucket in the host's memory to the link. Runs on the lane."""
        pieces = self.cutting.pieces_of(message)
        answers = ResponseFuture(len(pieces))
        dtype = _DTYPES[body.dtype]
        for piece in pieces:
            parts = (piece.keys, *spans_of(body, piece))
            frame = Frame(Kind.PUSH, self._num_pushed, piece.num_keys, dtype, parts)
            self._num_pushed = (self._num_pushed + 1) % (1 << 32)  # a frame's number has 32 bits
            self.link.ask(piece.server, frame, answers, spans_of(answer, piece))
        return answers

    def _open(self) -> None:
        """Find the servers and connect. Collective; blocks. Runs on the lane."""
        if self._link is not None:
            return
        session = self._session_name()
        rank, size = self._group.rank(), self._group.size()
        timeout_s = self._timeout.total_seconds()
        store = dist.PrefixStore(f"paceline/servers/{session}", self._store)
        addresses = self._addresses or find_addresses(store, rank, size, self._timeout)
        cutting = Cutting(self._parameters, len(addresses))
        who = Identity(rank, size, session, timeout_s, os.environ.get(TOKEN, ""))
        self._link, self._cutting = ServerLink(addresses, who), cutting
        weakref.finalize(self, ServerLink.close, self._link, 0.0)  # servers are told that the model is gone
        self._on_open(self)


def find_addresses(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Sequence[str]:
    """Return the servers of all launchers, in the order of the ranks."""
    rendezvous = Rendezvous(store, rank, size, timeout, "finding the parameter servers")
    rendezvous.publish("servers", os.environ.get(SERVERS, ""))
    named = [address for words in rendezvous.collect("servers") for address in words.decode().split(",")]
    found = [address for address in dict.fromkeys(named) if address]
    if not found:
        raise ConfigurationError(
            "ParameterServers has no servers. Start the job with paceline run --servers 2. Or start servers with "
            "paceline serve, and name them: --servers 10.0.0.5:7000 or ParameterServers(addresses=...). "
            "`paceline explain has no servers` says more."
        )
    return found


def ask_all(link: ServerLink, frame_of: Callable[[int], Frame]) -> list[Any]:
    """Ask every server. Return the answers' bodies by server. Blocks; runs on the lane."""
    asked = [ResponseFuture(1) for _ in range(link.num_servers)]
    for number, answers in enumerate(asked):
        link.ask(number, frame_of(number), answers)
    for answers in asked:
        answers.wait()
    return [answers.bodies[0] for answers in asked]
