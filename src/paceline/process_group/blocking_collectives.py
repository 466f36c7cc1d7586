"""The blocking form of every collective of our backend: in shared memory, between hosts by a schedule, or over Gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions

from paceline.process_group.across_hosts import AcrossHosts
from paceline.process_group.connections import Gloo
from paceline.process_group.descriptor import Descriptor, dtype_name
from paceline.process_group.folds import (
    PREMULTIPLIED,
    Fold,
    factor_of,
    flat_view,
    flat_views,
    fold_of,
    op_name,
)
from paceline.process_group.host_collectives import HostCollectives
from paceline.process_group.shared_vectors import SharedVectors
from paceline.process_group.staging import MOST_NUMBERS
from paceline.transports.shared_memory import Host


class BlockingCollectives:
    """Performs collectives on the calling thread. Called in one order on every rank.

    Nobody else uses `inner`, a Gloo group over all ranks, at the same time.
    """

    def __init__(self, host: Host, here: HostCollectives, across: AcrossHosts, inner: Gloo) -> None:
        self._here = here
        self._across = across
        self._inner = inner
        self._alone = host.is_only_one
        self._num_ranks = inner.size()
        self._number = 0

    def _next(self) -> int:
        self._number += 1
        return self._number

    def all_reduce(self, tensor: Tensor, options: dist.AllreduceOptions) -> None:
        if tensor.is_sparse:
            self.inner("all-reduce", lambda: self._inner.allreduce([tensor], options))
            return
        fold = _fold(options.reduceOp, tensor)
        what = Descriptor.of(self._next(), "all-reduce", tensor, fold.name)
        with flat_view(tensor, is_output=True) as flat:
            _premultiply([flat], options.reduceOp)
            values = flat if flat.dtype == fold.view_as else flat.view(fold.view_as)
            if self._alone:
                self._here.all_reduce(what, values, fold)
            else:
                self._across.prepare()
                self._here.all_reduce(what, values, fold, lambda share: self._across.all_reduce(share, fold))

    def broadcast(self, tensor: Tensor, options: dist.BroadcastOptions) -> None:
        if not self._alone and not self._across.is_by_datagrams():
            with nullcontext(tensor) if tensor.is_cpu else flat_view(tensor, is_output=True) as sent:
                self.inner("broadcast", lambda: self._inner.broadcast([sent], options))
            return
        what = Descriptor.of(self._next(), "broadcast", tensor, root=options.rootRank)
        with flat_view(tensor, is_output=True) as flat:
            if not self._alone:
                self._across.broadcast(flat, options.rootRank)
                return
            self._here.broadcast(what, flat, options.rootRank)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        if not self._alone and not self._across.is_by_datagrams():
            options = AllgatherOptions()
            with ExitStack() as stack:
                rows, sent = list(outputs), tensor
                if not tensor.is_cpu:
                    sent = stack.enter_context(flat_view(tensor, is_output=False))
                    rows = stack.enter_context(flat_views(outputs, are_outputs=True))
                self.inner("all-gather", lambda: self._inner.allgather([rows], [sent], options))
            return
        what = Descriptor.of(self._next(), "all-gather", tensor)
        with flat_view(tensor, is_output=False) as flat, flat_views(outputs, are_outputs=True) as rows:
            if self._alone:
                self._here.all_gather(what, rows, flat)
                return
            every = flat.new_empty(flat.numel() * self._num_ranks)
            parts = every.split(flat.numel()) if flat.numel() else [every] * self._num_ranks
            parts[self._inner.rank()].copy_(flat)
            self._across.all_gather(every)
            for row, part in zip(rows, parts, strict=True):
                row.copy_(part)

    def reduce(self, tensor: Tensor, options: dist.ReduceOptions) -> None:
        fold = _fold(options.reduceOp, tensor)
        what = Descriptor.of(self._next(), "reduce", tensor, fold.name, options.rootRank)
        with flat_view(tensor, is_output=True) as flat:
            _premultiply([flat], options.reduceOp)
            if self._alone:
                self._here.reduce(what, flat.view(fold.view_as), fold, options.rootRank)
                return
            wide = flat.view(fold.view_as).to(fold.accumulate_in)
            _simplify(options, fold)
            self._inner.reduce([wide], options).wait()
            if self._inner.rank() == options.rootRank:
                self._finalize(flat.view(fold.view_as), wide, fold)

    def reduce_scatter(
        self, output: Tensor, rows: Sequence[Tensor], options: dist.ReduceScatterOptions
    ) -> None:
        fold = _fold(options.reduceOp, output)
        what = Descriptor.of(self._next(), "reduce-scatter", output, fold.name)
        if factor_of(options.reduceOp) is not None:
            rows = [row.clone() for row in rows]
            _premultiply(rows, options.reduceOp)
        with flat_view(output, is_output=True) as flat, flat_views(rows, are_outputs=False) as flat_rows:
            seen = [row.view(fold.view_as) for row in flat_rows]
            if self._alone:
                self._here.reduce_scatter(what, flat.view(fold.view_as), seen, fold)
                return
            wide = flat.view(fold.view_as).to(fold.accumulate_in)
            _simplify(options, fold)
            wide_rows = [row.to(fold.accumulate_in) for row in seen]
            self._inner.reduce_scatter([wide], [wide_rows], options).wait()
            self._finalize(flat.view(fold.view_as), wide, fold)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Exchange rows, one for each rank; lengths may differ, dtypes may not."""
        if not self._alone or self._num_ranks >= MOST_NUMBERS:
            self._all_to_all_over_gloo(outputs, inputs)
            return
        what = Descriptor(self._next(), "all-to-all", dtype_name(inputs[0].dtype))
        with flat_views(outputs, are_outputs=True) as places, flat_views(inputs, are_outputs=False) as rows:
            self._here.all_to_all(what, places, rows)

    def _all_to_all_over_gloo(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Through flat buffers: Gloo has it for one tensor only."""
        flat = torch.cat([row.reshape(-1) for row in inputs])
        sizes = [[row.numel() for row in rows] for rows in (outputs, inputs)]
        received = flat.new_empty(sum(sizes[0]))
        self._inner.alltoall_base(received, flat, *sizes, AllToAllOptions()).wait()
        for output, part in zip(outputs, received.split(sizes[0]), strict=True):
            output.copy_(part.view(output.shape))

    def on_all_vectors(self, kind: str, tensor: Tensor, perform: Callable[[SharedVectors], None]) -> None:
        """Let every rank work on its share of all ranks' vectors; where all are on one host."""
        what = Descriptor.of(self._next(), kind, tensor)
        with flat_view(tensor, is_output=True) as flat:
            self._here.on_all_vectors(what, flat, perform)

    def _finalize(self, target: Tensor, completed: Tensor, fold: Fold) -> None:
        """Average what Gloo has summed, and round it into `target`."""
        if fold.averages:
            fold.average(completed, self._num_ranks)
        if completed.data_ptr() != target.data_ptr():
            target.copy_(completed)

    def barrier(self) -> None:
        if not self._alone:
            self.inner("barrier", lambda: self._inner.barrier(dist.BarrierOptions()))
            return
        self._here.barrier(Descriptor.of(self._next(), "barrier"))

    def inner(self, kind: str, launch: Callable[[], dist.Work]) -> None:
        """Perform something over Gloo; on one host the ranks first compare what it is."""
        if self._alone:
            self._here.barrier(Descriptor.of(self._next(), kind))
        launch().wait()


def _fold(op: Any, tensor: Tensor) -> Fold:
    name = op_name(op)
    return fold_of("SUM" if name == PREMULTIPLIED else name, tensor.dtype)


def check_reducible(op: Any, tensor: Tensor) -> None:
    """Raise ConfigurationError, before anything is launched, for an operation that does not exist for the dtype."""
    if not tensor.is_sparse:
        _fold(op, tensor)


def _premultiply(tensors: Sequence[Tensor], op: Any) -> None:
    factor = factor_of(op)
    if factor is not None:
        for tensor in tensors:
            tensor.mul_(factor)


def _simplify(options: Any, fold: Fold) -> None:
    """Ask Gloo for an operation that it has: an average begins as a sum."""
    options.reduceOp = getattr(dist.ReduceOp, "SUM" if fold.averages else fold.name)
