"""The blocking form of every collective of our backend: in shared memory, between hosts by a schedule, or over Gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions

from paceline.errors import ConfigurationError
from paceline.process_group.connections import AcrossHosts, Gloo
from paceline.process_group.descriptor import described, dtype_name
from paceline.process_group.folds import (
    Fold,
    apart,
    bytes_of,
    factor_of,
    flat_of,
    fold_by,
    op_name,
    write_back,
)
from paceline.process_group.host_collectives import HostCollectives
from paceline.process_group.shared_vectors import SharedVectors
from paceline.process_group.staging import MOST_NUMBERS
from paceline.transports.shared_memory import Host

_SUMMED_BY_GLOO = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
)


class BlockingCollectives:
    """Performs collectives on the calling thread. Called in one order on every rank.

    No other code uses `inner`, a Gloo group over all ranks, at the same time.
    """

    def __init__(self, host: Host, here: HostCollectives, across: AcrossHosts, inner: Gloo) -> None:
        self._here = here
        self._across = across
        self._inner = inner
        self._alone = host.is_only_one
        self._num_ranks = sum(map(len, host.hosts))
        self._rank = host.me.rank

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp, fold: Fold | None) -> None:
        if fold is None:
            options = AllreduceOptions()
            options.reduceOp = op
            if self._alone:
                self._here.barrier(described("all-reduce"))
            self._inner.allreduce([tensor], options).wait()
            return
        flat = flat_of(tensor)
        self._fold_all(flat, op, fold)
        write_back(flat, tensor)

    def _fold_all(self, flat: Tensor, op: dist.ReduceOp, fold: Fold) -> None:
        if fold.premultiplies:
            flat.mul_(factor_of(op))
        what = described("all-reduce", flat.dtype, flat.numel(), fold.name)
        values = flat if flat.dtype == fold.view_as else flat.view(fold.view_as)
        if self._alone:
            self._here.all_reduce(what, values, fold)
        else:
            self._across.prepare()
            self._here.all_reduce(what, values, fold, lambda share: self._across.all_reduce(share, fold))

    def broadcast(self, tensor: Tensor, options: dist.BroadcastOptions) -> None:
        root = options.rootRank
        flat = flat_of(tensor)
        if self._alone:
            self._here.broadcast(described("broadcast", flat.dtype, flat.numel(), "", root), flat, root)
        else:
            self._inner.broadcast([bytes_of(flat)], options).wait()
        write_back(flat, tensor)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        flat, rows = flat_of(tensor), [flat_of(output) for output in outputs]
        if self._alone:
            if not self._here.is_small(flat.nbytes):  # which is staged whole before anything is written
                flat = apart([flat], rows, self._rank)[0]
            self._here.all_gather(described("all-gather", flat.dtype, flat.numel()), rows, flat)
        else:
            seen = [bytes_of(row) for row in rows]
            self._inner.allgather([seen], [bytes_of(flat)], AllgatherOptions()).wait()
        for row, output in zip(rows, outputs, strict=True):
            write_back(row, output)

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, options: dist.GatherOptions) -> None:
        """Give the root all tensors, over Gloo. Elsewhere there are no outputs."""
        flat, rows = flat_of(tensor), [flat_of(output) for output in outputs]
        if self._alone:
            self._here.barrier(described("gather", flat.dtype, flat.numel(), "", options.rootRank))
        seen = [[bytes_of(row) for row in rows]] if rows else []
        self._inner.gather(seen, [bytes_of(flat)], options).wait()
        for row, output in zip(rows, outputs, strict=True):
            write_back(row, output)

    def scatter(self, output: Tensor, rows: Sequence[Tensor], options: dist.ScatterOptions) -> None:
        """Give every rank one of the root's tensors, over Gloo. Elsewhere there are no rows."""
        flat = flat_of(output)
        flat_rows = apart([flat_of(row) for row in rows], [flat], -self._rank)
        if self._alone:
            self._here.barrier(described("scatter", flat.dtype, flat.numel(), "", options.rootRank))
        seen = [[bytes_of(row) for row in flat_rows]] if rows else []
        self._inner.scatter([bytes_of(flat)], seen, options).wait()
        write_back(flat, output)

    def reduce(self, tensor: Tensor, options: dist.ReduceOptions) -> None:
        """Fold all tensors into the root's. Across hosts all ranks get the fold, which only the root keeps."""
        op, root = options.reduceOp, options.rootRank
        fold = fold_by(op, tensor.dtype)
        is_root, flat = self._rank == root, flat_of(tensor)
        if not is_root and (fold.premultiplies or not self._alone):
            flat = flat.clone()
        if self._alone:
            if fold.premultiplies:
                flat.mul_(factor_of(op))
            what = described("reduce", flat.dtype, flat.numel(), fold.name, root)
            self._here.reduce(what, flat.view(fold.view_as), fold, root)
        else:
            self._fold_all(flat, op, fold)
        if is_root:
            write_back(flat, tensor)

    def reduce_scatter(
        self, output: Tensor, rows: Sequence[Tensor], options: dist.ReduceScatterOptions
    ) -> None:
        op = options.reduceOp
        fold = fold_by(op, output.dtype)
        flat = flat_of(output)
        flat_rows = apart([flat_of(row) for row in rows], [flat], -self._rank)
        if fold.premultiplies:
            factor = factor_of(op)
            flat_rows = [row.clone().mul_(factor) for row in flat_rows]
        values, seen = flat.view(fold.view_as), [row.view(fold.view_as) for row in flat_rows]
        if self._alone:
            what = described("reduce-scatter", flat.dtype, flat.numel(), fold.name)
            self._here.reduce_scatter(what, values, seen, fold)
        else:
            received = [torch.empty_like(values) for _ in seen]
            self._all_to_all_over_gloo(received, seen)
            fold.all_of(received, values, self._num_ranks)
        write_back(flat, output)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Exchange rows, one for each rank; lengths may differ, dtypes may not."""
        places = [flat_of(output) for output in outputs]
        rows = apart([flat_of(row) for row in inputs], places)
        if self._alone and self._num_ranks < MOST_NUMBERS:
            self._here.all_to_all(described("all-to-all", inputs[0].dtype), places, rows)
        else:
            self._all_to_all_over_gloo(places, rows)
        for place, output in zip(places, outputs, strict=True):
            write_back(place, output)

    def _all_to_all_over_gloo(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Through flat buffers: Gloo has it for one tensor only."""
        flat = torch.cat([bytes_of(row) for row in inputs])
        sizes = [[row.nbytes for row in rows] for rows in (outputs, inputs)]
        received = flat.new_empty(sum(sizes[0]))
        self._inner.alltoall_base(received, flat, *sizes, AllToAllOptions()).wait()
        for output, part in zip(outputs, received.split(sizes[0]), strict=True):
            bytes_of(output).copy_(part)

    def on_all_vectors(self, kind: str, tensor: Tensor, perform: Callable[[SharedVectors], None]) -> None:
        """Let every rank work on its share of all ranks' vectors; where all are on one host."""
        flat = flat_of(tensor)
        self._here.on_all_vectors(kind, flat, perform)
        write_back(flat, tensor)

    def barrier(self) -> None:
        if self._alone:
            self._here.barrier(described("barrier"))
        else:
            self._inner.barrier(dist.BarrierOptions()).wait()


def reducible(op: Any, tensor: Tensor) -> Fold | None:
    """Return how to fold such tensors, None for a sum of sparse ones. ConfigurationError: nothing folds them."""
    if not tensor.is_sparse:
        return fold_by(op, tensor.dtype)
    if op_name(op) != "SUM" or tensor.dtype not in _SUMMED_BY_GLOO:
        raise ConfigurationError(
            f"cannot reduce sparse {tensor.dtype} by {op_name(op)}: sparse tensors are summed, of Gloo's dtypes "
            f"({', '.join(map(dtype_name, _SUMMED_BY_GLOO))}). Nothing was sent."
        )
    return None
