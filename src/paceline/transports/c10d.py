"""A transport over the send and recv of a c10d backend, such as Gloo.

Gloo announces a message, waits until the peer has a buffer for it, and sends it straight into that. Several messages
are under way at once. A message larger than its receiver's buffer would end the process. So its size is its tag: a
message of another size finds no receiver, and the exchange times out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from paceline.comm.collectives import irecv, isend
from paceline.errors import PeerLostError
from paceline.transports.transport import Message, Transport

GRACE_S = 1.0
_MAX_TAG = 2**31 - 1


class C10dTransport(Transport):
    """Uses a c10d backend for CPU tensors, such as a `ProcessGroupGloo`, which nothing else may use meanwhile."""

    def __init__(self, backend: Any) -> None:
        super().__init__(backend.rank(), backend.size())
        self._backend = backend
        self._abandoned: list[Any] = []
        """Messages of a failed exchange: the backend may still write into a tensor that is among them."""

    def _exchange(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        timeout_s: float,
        on_received: Callable[[int], None],
    ) -> None:
        deadline = time.monotonic() + timeout_s
        receiving: list[dist.Work] = []
        sending: list[dist.Work] = []
        try:
            for peer, tensor in receives:
                receiving.append(self._launch(irecv, peer, tensor))
            for peer, tensor in sends:
                sending.append(self._launch(isend, peer, tensor))
            for index, (peer, _) in enumerate(receives):
                self._wait(receiving[index], peer, deadline, timeout_s)
                on_received(index)
            for work, (peer, _) in zip(sending, sends, strict=True):
                self._wait(work, peer, deadline, timeout_s)
        except BaseException:
            self._abandoned = [receiving, sending, list(sends), list(receives)]
            _flush(sending)
            raise

    def _launch(self, operation: Callable[..., dist.Work], peer: int, tensor: Tensor) -> dist.Work:
        try:
            return operation(tensor, self._backend, peer, tensor.nbytes & _MAX_TAG)
        except RuntimeError as error:
            raise self._lost(peer, error, 0.0, 0.0) from error

    def _wait(self, work: dist.Work, peer: int, deadline: float, timeout_s: float) -> None:
        """Wait for a message. Gloo takes 0 for no timeout, and counts in milliseconds."""
        try:
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:
            left_s = max(deadline - time.monotonic(), 0.0)
            raise self._lost(peer, error, timeout_s - left_s, timeout_s) from error

    def _lost(self, peer: int, error: RuntimeError, waited_s: float, timeout_s: float) -> PeerLostError:
        if "imed out" in str(error):
            waited_s = round(waited_s, 2)
            early = (
                f" (of {timeout_s:g}: its connection had failed before)" if waited_s < 0.9 * timeout_s else ""
            )
            words = f"heard nothing from rank {peer} for {waited_s:g} s{early}: it is stuck, stopped or unreachable"
        else:
            words = f"lost rank {peer}, which ended or gave up"
        return PeerLostError(f"rank {self.rank} {words}", peer)


def _flush(sending: Sequence[dist.Work]) -> None:
    """Wait a moment for messages under way: a peer in another collective is to receive our header, too."""
    deadline = time.monotonic() + GRACE_S
    with suppress(RuntimeError):
        for work in sending:
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
