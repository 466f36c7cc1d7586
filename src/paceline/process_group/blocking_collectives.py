"""The blocking form of every collective of our backend: in shared memory, between hosts by a schedule, or over Gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions

from paceline.process_group.across_hosts import AcrossHosts
from paceline.process_group.connections import Gloo
from paceline.process_group.descriptor import described
from paceline.process_group.folds import Fold, factor_of, flat_of, fold_by, write_back
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
        self._num_ranks = sum(map(len, host.hosts))

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp, fold: Fold | None) -> None:
        if fold is None:
            options = AllreduceOptions()
            options.reduceOp = op
            self.inner("all-reduce", lambda: self._inner.allreduce([tensor], options))
            return
        flat = flat_of(tensor)
        if fold.premultiplies:
            flat.mul_(factor_of(op))
        what = described("all-reduce", flat.dtype, flat.numel(), fold.name)
        values = flat if flat.dtype == fold.view_as else flat.view(fold.view_as)
        if self._alone:
            self._here.all_reduce(what, values, fold)
        else:
            self._across.prepare()
            self._here.all_reduce(what, values, fold, lambda share: self._across.all_reduce(share, fold))
        write_back(flat, tensor)

    def broadcast(self, tensor: Tensor, options: dist.BroadcastOptions) -> None:
        root = options.rootRank
        if not self._alone:
            sent = tensor if tensor.is_cpu else flat_of(tensor)
            self.inner("broadcast", lambda: self._inner.broadcast([sent], options))
            if sent is not tensor:
                write_back(sent, tensor)
            return
        flat = flat_of(tensor)
        self._here.broadcast(described("broadcast", flat.dtype, flat.numel(), "", root), flat, root)
        write_back(flat, tensor)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        if not self._alone and tensor.is_cpu:
            self._gather_by_gloo([*outputs], tensor)
            return
        flat, rows = flat_of(tensor), [flat_of(output) for output in outputs]
        if self._alone:
            self._here.all_gather(described("all-gather", flat.dtype, flat.numel()), rows, flat)
        else:
            self._gather_by_gloo(rows, flat)
        for row, output in zip(rows, outputs, strict=True):
            write_back(row, output)

    def _gather_by_gloo(self, outputs: list[Tensor], tensor: Tensor) -> None:
        self.inner("all-gather", lambda: self._inner.allgather([outputs], [tensor], AllgatherOptions()))

    def reduce(self, tensor: Tensor, options: dist.ReduceOptions) -> None:
        op, root = options.reduceOp, options.rootRank
        fold = fold_by(op, tensor.dtype)
        flat = flat_of(tensor)
        if fold.premultiplies:
            flat.mul_(factor_of(op))
        values = flat.view(fold.view_as)
        if self._alone:
            what = described("reduce", flat.dtype, flat.numel(), fold.name, root)
            self._here.reduce(what, values, fold, root)
        else:
            wide = values.to(fold.accumulate_in)
            _simplify(options, fold)
            self._inner.reduce([wide], options).wait()
            if self._inner.rank() == root:
                self._finalize(values, wide, fold)
        write_back(flat, tensor)

    def reduce_scatter(
        self, output: Tensor, rows: Sequence[Tensor], options: dist.ReduceScatterOptions
    ) -> None:
        op = options.reduceOp
        fold = fold_by(op, output.dtype)
        flat_rows = [flat_of(row) for row in rows]
        if fold.premultiplies:
            factor = factor_of(op)
            flat_rows = [row.clone().mul_(factor) for row in flat_rows]
        flat = flat_of(output)
        values, seen = flat.view(fold.view_as), [row.view(fold.view_as) for row in flat_rows]
        if self._alone:
            what = described("reduce-scatter", flat.dtype, flat.numel(), fold.name)
            self._here.reduce_scatter(what, values, seen, fold)
        else:
            wide = values.to(fold.accumulate_in)
            _simplify(options, fold)
            wide_rows = [row.to(fold.accumulate_in) for row in seen]
            self._inner.reduce_scatter([wide], [wide_rows], options).wait()
            self._finalize(values, wide, fold)
        write_back(flat, output)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Exchange rows, one for each rank; lengths may differ, dtypes may not."""
        if not self._alone or self._num_ranks >= MOST_NUMBERS:
            self._all_to_all_over_gloo(outputs, inputs)
            return
        places, rows = [flat_of(output) for output in outputs], [flat_of(row) for row in inputs]
        self._here.all_to_all(described("all-to-all", inputs[0].dtype), places, rows)
        for place, output in zip(places, outputs, strict=True):
            write_back(place, output)

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
        flat = flat_of(tensor)
        self._here.on_all_vectors(kind, flat, perform)
        write_back(flat, tensor)

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
        self._here.barrier("barrier")

    def inner(self, kind: str, launch: Callable[[], dist.Work]) -> None:
        """Perform something over Gloo; on one host the ranks first compare what it is."""
        if self._alone:
            self._here.barrier(kind)
        launch().wait()


def reducible(op: Any, tensor: Tensor) -> Fold | None:
    """How to fold such tensors, None if they are sparse; ConfigurationError if the dtype has no such operation."""
    return None if tensor.is_sparse else fold_by(op, tensor.dtype)


def _simplify(options: Any, fold: Fold) -> None:
    """Ask Gloo for an operation that it has: an average begins as a sum."""
    options.reduceOp = getattr(dist.ReduceOp, "SUM" if fold.averages else fold.name)
