"""Transports: the interface that moves messages between ranks, and one over a c10d group or some of the ranks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from paceline.comm.collectives import irecv, isend
from paceline.errors import ConfigurationError, PeerLostError, ProtocolError

Message = tuple[int, Tensor]
"""A peer, and the tensor that is sent to it or received from it: one-dimensional, contiguous, not empty."""
Messages = Sequence[Message]
OnReceived = Callable[[int], None]


class Transport(ABC):
    """The interface that moves messages between `num_ranks` ranks. This one has the number `rank`.

    Messages are bytes. A receive takes the oldest message from its peer that has the expected number of bytes. One
    of any other size is never delivered into it, so ranks that disagree on sizes run into the timeout instead of
    overwriting memory.

    After an error the transport can't be used any more: messages may be under way that no call awaits.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.bytes_sent = 0
        """Of all exchanges that succeeded."""
        self.names: Sequence[int] = range(num_ranks)
        """What its ranks are called in errors."""
        self._failure: str | None = None

    def exchange(
        self, sends: Messages, receives: Messages, timeout_s: float, on_received: OnReceived | None = None
    ) -> None:
        """Perform one round: all messages are under way at once.

        Args:
            sends: To whom, what; unchanged until this returns.
            receives: From whom, into what.
            timeout_s: For the whole round.
            on_received: Called with 0, 1, ... in the order of `receives`. Each call comes as soon as that tensor and
                those before it are filled. What it raises ends the exchange; what was to be sent still leaves if its
                receiver takes it within a second.

        Contract:
            Collective: every message has a counterpart, in the same order between two ranks.  Blocks: until
            `receives` are filled and `sends` may be changed.  Mutates: `receives`; after an error they are
            undefined.

        Raises:
            PeerLostError: a peer died, or did not send or take its message in time. Names it.
            ProtocolError: an earlier exchange failed.
        """
        if self._failure is not None:
            raise ProtocolError(
                f"rank {self.rank} can't communicate any more: {self._failure}. "
                "Destroy the process group and make a new one."
            )
        self._check(sends)
        self._check(receives)
        try:
            self._exchange(sends, receives, timeout_s, on_received or (lambda _: None))
        except BaseException as error:
            self._failure = f"an earlier exchange failed ({error})"
            raise
        self.bytes_sent += sum(tensor.nbytes for _, tensor in sends)

    @abstractmethod
    def _exchange(
        self, sends: Messages, receives: Messages, timeout_s: float, on_received: OnReceived
    ) -> None: ...

    def _check(self, messages: Messages) -> None:
        for peer, tensor in messages:
            if not 0 <= peer < self.num_ranks or peer == self.rank:
                raise ConfigurationError(
                    f"rank {self.rank} of {self.num_ranks} can't exchange a message with rank {peer}"
                )
            if tensor.dim() != 1 or not tensor.is_contiguous() or not tensor.numel():
                raise ConfigurationError(
                    f"a message is a contiguous tensor of one dimension with at least one element, not one of "
                    f"shape {tuple(tensor.shape)} and strides {tensor.stride()}"
                )


class Subset(Transport):
    """The ranks `members` of `whole`, this one among them, renumbered from 0. Errors name them by `whole`'s numbers."""

    def __init__(self, whole: Transport, members: Sequence[int]) -> None:
        super().__init__(members.index(whole.rank), len(members))
        self._whole = whole
        self.names = tuple(members)

    def _exchange(
        self, sends: Messages, receives: Messages, timeout_s: float, on_received: OnReceived
    ) -> None:
        to, of = ([(self.names[peer], tensor) for peer, tensor in each] for each in (sends, receives))
        self._whole.exchange(to, of, timeout_s, on_received)


GRACE_S = 1.0
_MAX_TAG = 2**31 - 1


class C10dTransport(Transport):
    """A transport of CPU tensors over a c10d backend, such as a `ProcessGroupGloo`, that nothing else uses."""

    def __init__(self, backend: Any) -> None:
        super().__init__(backend.rank(), backend.size())
        self._backend = backend
        self._abandoned: list[Any] = []
        """Messages of a failed exchange: the backend may still write into a tensor that is among them."""

    def _exchange(
        self, sends: Messages, receives: Messages, timeout_s: float, on_received: OnReceived
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
    """Wait up to a second for messages being sent. Otherwise a peer in another collective misses this rank's header."""
    deadline = time.monotonic() + GRACE_S
    with suppress(RuntimeError):
        for work in sending:
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
