"""The mean of the ranks' gradients over UDP, of which a bounded part may be lost: `reduction=BoundedLoss(bound=0.01)`.

Rules
1. It has connections of its own, made from c10d's store at the first launch, as Adasum does. Control words, buffers and
   everything else go over the caller's group, where nothing is lost.
2. Each rank sums one shard of a bucket directly from the others, so that a lost datagram concerns one pair of ranks.
   The sum of what arrived is scaled up element by element for what did not; then it is sent to all, without any loss.
3. So all ranks hold the same bits, and the expectation over losses is the mean.
"""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from paceline.comm.collectives import device_for_metadata, launch_broadcast
from paceline.comm.lane import Lane, LaneWork
from paceline.comm.pending import Done, Pending, PendingWork
from paceline.observe import StepTiming
from paceline.process_group.connections import open_lossy_transport, store_of_job, timeout_of
from paceline.reductions.reduction import Message, Reduction
from paceline.transports import Bound, LossyTransport, Sum

_NATIVE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class LossReport:
    """What was lost in one step. A contribution is a datagram's worth of one rank's gradient, for another's shard.

    Attributes:
        lost: Contributions that did not arrive, over all ranks and buckets.
        sent: Contributions that were sent for the first time, likewise.
        by_rank: Of the lost ones, those for the shard of each rank.
        by_bucket: Of the lost ones, those of each bucket, in launch order.
    """

    lost: int = 0
    sent: int = 0
    by_rank: tuple[int, ...] = ()
    by_bucket: tuple[int, ...] = ()

    @property
    def ratio(self) -> float:
        """Lost over sent."""
        return self.lost / self.sent if self.sent else 0.0


class BoundedLoss(Reduction):
    """The mean of the ranks' gradients, where the network may lose a bounded part of what they send each other.

    Limits first: it helps where the network loses or drops packets; on a clean network it gains nothing over Gloo, and
    costs more of the processor. Linux, IPv4. Gradients that are not float32 or float64 travel as float32; those of an
    accelerator are staged through host memory (written for it, tested on CPUs only). Sparse gradients go over the
    process group.

    Args:
        bound: The largest part of what a rank sends another that may be lost of a bucket; 0 repeats every loss.
        protected_ratio: The part of a shard's datagrams, those of the largest mean magnitude, of which nothing may be
            lost.

    Attributes:
        losses: What was lost in the last step; the same on every rank.

    Cost:
        Each rank sends 2(P-1)/P of the gradients' bytes and 7 % more for headers, in 2 rounds. It holds the others'
        contributions to its shard, as much memory as the bucket, for each of up to 8 buckets under way.

    Source:
        The bound: Wang et al. 2020, "Domain-specific communication optimization for distributed DNN training" (DLCP),
        section 3. The division by what arrived: as in Weintraub et al. 2025, but unbiased also in this rank's share:
        own + n/k * (sum of the k of n others that arrived).
    """

    def __init__(self, bound: float = 0.01, protected_ratio: float = 0.0) -> None:
        self._bound = Bound(bound, protected_ratio)
        self.losses = LossReport()
        self._connection: _Connection | None = None
        self._prepared_for: ProcessGroup | None = None
        self._sums: list[_Reduced] = []

    @property
    def bound(self) -> float:
        """The largest part that may be lost."""
        return self._bound.ratio

    def __repr__(self) -> str:
        return f"BoundedLoss(bound={self._bound.ratio}, protected_ratio={self._bound.protected_ratio})"

    def __getstate__(self) -> dict[str, Any]:
        """The settings only: a copy makes connections of its own."""
        return {"bound": self._bound.ratio, "protected_ratio": self._bound.protected_ratio}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        BoundedLoss.__init__(self, **state)

    def prepare(self, named_parameters: Mapping[str, Parameter], process_group: ProcessGroup) -> None:
        if process_group is not self._prepared_for:
            self._connection = None  # the other group may have been destroyed
        self._prepared_for = process_group

    def begin_step(self) -> None:
        self._sums = []

    def launch(self, message: Message) -> Pending:
        if message.process_group.size() == 1:
            return Done()
        if self._connection is None:
            self._connection = _Connection(message.process_group, message.flat.device)
        launched = self._connection.launch(message.body, self._bound)
        self._sums.append(launched)
        return launched

    def end_step(self, timing: StepTiming) -> None:
        found = [losses for losses in (each.losses for each in self._sums) if losses is not None]
        self._sums = []
        by_rank = [sum(missing) for missing in zip(*(losses.missing for losses in found), strict=True)]
        self.losses = LossReport(
            lost=sum(by_rank),
            sent=sum(sum(losses.expected) for losses in found),
            by_rank=tuple(by_rank),
            by_bucket=tuple(sum(losses.missing) for losses in found),
        )

    @property
    def counters(self) -> dict[str, int]:
        """Datagrams of this rank: sent, repeated, those of strangers that were dropped, and others. Local."""
        return self._connection.counters() if self._connection is not None else {}


class _Reduced:
    """The handle of a bucket: first it is handed to the link, on a lane; then summed."""

    def __init__(self, body: Tensor) -> None:
        self._body = body
        self._staged = body
        self._sum: Sum | None = None
        self._work: PendingWork | None = None
        self._lock = threading.Lock()
        self._is_finished = False

    def start(self, lane: Lane, connect: Callable[[], LossyTransport], bound: Bound) -> None:
        def perform() -> None:
            if self._body.device.type != "cpu" or self._body.dtype not in _NATIVE:
                dtype = self._body.dtype if self._body.dtype in _NATIVE else torch.float32
                self._staged = self._body.detach().to("cpu", dtype)
            self._sum = connect().launch(self._staged.detach().numpy(), bound)

        work = LaneWork(perform, [self._body], "bounded_loss")
        lane.launch(work, at_once=False)
        self._work = PendingWork(work)

    @property
    def losses(self) -> Any:
        return None if self._sum is None else self._sum.losses

    def wait(self, timeout_s: float | None = None) -> bool:
        assert self._work is not None
        until_s = None if timeout_s is None else time.perf_counter() + timeout_s
        if not self._work.wait(timeout_s):
            return False
        assert self._sum is not None
        left_s = None if until_s is None else max(1e-3, until_s - time.perf_counter())
        if not self._sum.wait(left_s):
            return False
        with self._lock:
            if not self._is_finished and self._staged is not self._body:
                self._body.copy_(self._staged)
            self._is_finished = True
        return True

    def on_done(self, callback: Callable[[], None]) -> None:
        def when_launched() -> None:
            if self._sum is not None:
                self._sum.on_done(callback)

        assert self._work is not None
        self._work.on_done(when_launched)


class _Connection:
    """The link over one process group, and the lane on which it is opened and handed its buckets.

    Contract:
        Collective: making one, and `launch`; neither blocks.
    """

    def __init__(self, process_group: ProcessGroup, device: torch.device) -> None:
        self._group = process_group
        self._timeout: timedelta = timeout_of(process_group)
        self._store = store_of_job("BoundedLoss")
        self._token = torch.tensor(
            [secrets.randbits(62)], device=device_for_metadata(process_group, device)
        )  # rank 0's, so it is the same whatever failed before on one of the ranks
        self._token_sent = launch_broadcast(self._token, process_group, source=0)
        self._link: LossyTransport | None = None
        self._lane = Lane(f"paceline bounded-loss lane of rank {process_group.rank()}")
        self._let_go = weakref.finalize(self, self._lane.close, 0.0)

    def launch(self, body: Tensor, bound: Bound) -> _Reduced:
        reduced = _Reduced(body)
        reduced.start(self._lane, self._connect, bound)
        return reduced

    def counters(self) -> dict[str, int]:
        return {} if self._link is None else self._link.counters

    def _connect(self) -> LossyTransport:
        if self._link is None:
            self._token_sent.wait()
            store = dist.PrefixStore(f"paceline/bounded_loss/{int(self._token.item())}", self._store)
            group = self._group
            self._link = open_lossy_transport(store, group.rank(), group.size(), self._timeout)
        return self._link
