"""What to perform, and where: between the ranks of this host in shared memory, the rest over Gloo. All of it blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from paceline.process_group.flat import flat_view, flat_views
from paceline.process_group.folding import Fold, real_view
from paceline.process_group.host_collectives import HostCollectives
from paceline.process_group.operation import operation
from paceline.transports.shared_memory import Host


class Collectives:
    """The blocking form of every collective. Called in one order on every rank.

    Args:
        host: The ranks of this host, and which others there are.
        here: What they do together.
        inner: A Gloo group over all ranks, used by nobody else at the same time.
    """

    def __init__(self, host: Host, here: HostCollectives, inner: dist.ProcessGroupGloo) -> None:
        self._here = here
        self._inner = inner
        self._alone = len(host.hosts) == 1
        self._number = 0

    def _next(self) -> int:
        self._number += 1
        return self._number

    def all_reduce(self, tensor: Tensor, fold: Fold, options: dist.AllreduceOptions) -> None:
        if tensor.is_sparse or not self._alone:
            self.inner("all-reduce", lambda: self._inner.allreduce([tensor], options))
            return
        what = operation(self._next(), "all-reduce", tensor.dtype, tensor.numel(), fold.number)
        with flat_view(tensor, is_output=True) as flat:
            self._here.all_reduce(what, real_view(flat, fold), fold)

    def broadcast(self, tensor: Tensor, root: int, options: dist.BroadcastOptions) -> None:
        if not self._alone:
            self.inner("broadcast", lambda: self._inner.broadcast([tensor], options))
            return
        what = operation(self._next(), "broadcast", tensor.dtype, tensor.numel(), root=root)
        with flat_view(tensor, is_output=True) as flat:
            self._here.broadcast(what, flat, root)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        if not self._alone:
            options = dist.AllgatherOptions()
            self.inner("all-gather", lambda: self._inner.allgather([list(outputs)], [tensor], options))
            return
        what = operation(self._next(), "all-gather", tensor.dtype, tensor.numel())
        with flat_view(tensor, is_output=False) as flat, flat_views(outputs, are_outputs=True) as rows:
            self._here.all_gather(what, rows, flat)

    def reduce(self, tensor: Tensor, fold: Fold, root: int, options: dist.ReduceOptions) -> None:
        if not self._alone:
            self.inner("reduce", lambda: self._inner.reduce([tensor], options))
            return
        what = operation(self._next(), "reduce", tensor.dtype, tensor.numel(), fold.number, root)
        with flat_view(tensor, is_output=True) as flat:
            self._here.reduce(what, real_view(flat, fold), fold, root)

    def reduce_scatter(
        self, output: Tensor, rows: Sequence[Tensor], fold: Fold, options: dist.ReduceScatterOptions
    ) -> None:
        if not self._alone:
            self.inner("reduce-scatter", lambda: self._inner.reduce_scatter([output], [list(rows)], options))
            return
        what = operation(self._next(), "reduce-scatter", output.dtype, output.numel(), fold.number)
        with flat_view(output, is_output=True) as flat, flat_views(rows, are_outputs=False) as flat_rows:
            real_rows = [real_view(row, fold) for row in flat_rows]
            self._here.reduce_scatter(what, real_view(flat, fold), real_rows, fold)

    def barrier(self) -> None:
        if not self._alone:
            self.inner("barrier", lambda: self._inner.barrier(dist.BarrierOptions()))
            return
        self._here.barrier(operation(self._next(), "barrier"))

    def inner(self, kind: str, launch: Callable[[], dist.Work]) -> None:
        """Perform something over Gloo; on one host the ranks compare first what it is."""
        if self._alone:
            self._here.barrier(operation(self._next(), kind))
        launch().wait()
