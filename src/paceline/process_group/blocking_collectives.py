"""The blocking form of every collective of our backend: in shared memory, between hosts by a schedule, or over Gloo.

An all-gather and a reduce-scatter send each byte once to each other host. Ranks of equal place on their hosts exchange
theirs, and those of a host share them in memory. Hosts are of one size for this, and no sum is rounded in between.

c10d passes one tensor, a list with a row for each rank, or one large tensor, which is cut into rows that alias it. All
that can be wrong with a rank's own arguments is refused before anything is launched. So the group stays usable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
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
from paceline.process_group.host_collectives import HostCollectives, SharedVectors
from paceline.process_group.staging import MOST_NUMBERS
from paceline.transports.shared_memory import Host


class Rows:
    """Cuts and checks the tensors of a rank's collectives. ConfigurationError for those that do not fit. Local."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank = rank
        self._num_ranks = num_ranks

    def cut(self, kind: str, tensor: Tensor, num_elements: int) -> list[Tensor]:
        """Return a row of `num_elements` for each rank: 1-D views of `tensor`, which has to be contiguous."""
        if tensor.numel() != num_elements * self._num_ranks:
            raise ConfigurationError(
                f"{kind} on rank {self._rank}: the large tensor has {tensor.numel()} elements, which is not "
                f"{self._num_ranks} (ranks) times {num_elements}."
            )
        if not tensor.is_contiguous():
            raise ConfigurationError(
                f"{kind} on rank {self._rank}: the large tensor must be contiguous. Pass a copy."
            )
        flat = tensor.detach().view(-1)
        return list(flat.chunk(self._num_ranks)) if num_elements else [flat] * self._num_ranks

    def split(self, kind: str, tensor: Tensor, sizes: list[int]) -> list[Tensor]:
        """Cut along the first dimension: into rows of these sizes, or into equal ones if there are none."""
        if tensor.requires_grad:
            tensor = tensor.detach()
        size, num_ranks = tensor.shape[0], self._num_ranks
        fits = len(sizes) == num_ranks and sum(sizes) == size if sizes else size % num_ranks == 0
        if not fits:
            raise ConfigurationError(
                f"{kind} on rank {self._rank}: a tensor with {size} rows cannot be split into "
                f"{sizes or 'equal parts'} for {num_ranks} ranks."
            )
        if not sizes and size:
            return list(tensor.chunk(num_ranks))  # in a third of the time of `split`
        return list(tensor.split(sizes or [0] * num_ranks))

    def check(
        self, kind: str, reads: Sequence[Tensor], writes: Sequence[Tensor], options: Any = None
    ) -> None:
        """Make sure that values of one dtype can be moved from `reads` to `writes`, and that the root is a rank."""
        dtype, words = (reads or writes)[0].dtype, None
        for tensor in (*reads, *writes):
            words = words or _why_not(tensor)
            if tensor.dtype is not dtype:
                words = words or f"it takes tensors of one dtype, not of {dtype} and {tensor.dtype}"
        for tensor in writes:
            if not words and not tensor.is_contiguous() and _overlaps(tensor):
                words = "elements of a tensor that is written share memory, as after expand(). Pass a copy"
        if options is not None and not 0 <= options.rootRank < self._num_ranks:
            words = words or f"the root is {options.rootRank}, and there are ranks 0 to {self._num_ranks - 1}"
        if words:
            raise ConfigurationError(f"{kind} on rank {self._rank}: {words}. Nothing was sent.")

    def check_lengths(self, kind: str, rows: Sequence[Tensor], num_elements: int | None) -> None:
        """Make sure that there is a row for each rank: of `num_elements`, or of any length if None."""
        fit = num_elements is None or all(row.numel() == num_elements for row in rows)
        if len(rows) != self._num_ranks or not fit:
            each = "" if num_elements is None else f" of {num_elements} elements"
            raise ConfigurationError(
                f"{kind} on rank {self._rank} needs {self._num_ranks} tensors{each}; it got "
                f"{[row.numel() for row in rows]}."
            )

    def check_own(self, kind: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Make sure that the input for this rank itself is as long as the output for it."""
        sent, expected = reads[self._rank].numel(), writes[self._rank].numel()
        if sent != expected:
            raise ConfigurationError(
                f"{kind} on rank {self._rank}: the input for this rank itself has {sent} elements, and the output "
                f"{expected}. Nothing was sent."
            )

    def at_root(
        self, kind: str, lists: Sequence[Sequence[Tensor]], num_elements: int, options: Any
    ) -> list[Tensor]:
        """Return the rows of a collective in which only the root passes any; none on other ranks."""
        rows = [row for each in lists for row in each]
        if self._rank == options.rootRank:
            self.check_lengths(kind, rows, num_elements)
        elif rows:
            raise ConfigurationError(
                f"{kind} on rank {self._rank}: only rank {options.rootRank}, the root, passes a list."
            )
        return rows


@lru_cache(maxsize=64)
def _can_copy(dtype: torch.dtype) -> bool:
    """Return whether torch copies elements of this dtype; not those of less than a byte, nor quantized ones."""
    try:
        torch.zeros(dtype.itemsize, dtype=torch.uint8, device="cpu").view(dtype).clone()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _why_not(tensor: Tensor) -> str | None:
    """Return why the values of this tensor cannot be moved, in words; None: they can."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return (
            f"it takes no {'nested' if tensor.is_nested else tensor.layout} tensors. Pass their dense parts"
        )
    if tensor.is_meta:
        return "a tensor of the device meta has no values"
    return None if _can_copy(tensor.dtype) else f"torch cannot copy {tensor.dtype}. Pass another dtype"


def _overlaps(tensor: Tensor) -> bool:
    """Return whether elements may share memory, for which a dimension must step less than those inside it reach."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def only(tensors: list[Tensor]) -> Tensor:
    """Return the only tensor of a list, for collectives that take one per rank. Otherwise ConfigurationError."""
    if len(tensors) != 1:
        raise ConfigurationError(f"this collective takes one tensor a rank, not {len(tensors)}.")
    return tensors[0]


_SUMMED_BY_GLOO = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
)


class BlockingCollectives:
    """Performs collectives on the calling thread, in one order on every rank. No other code uses `inner` meanwhile."""

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
        elif flat.numel() and (columns := self._across.columns):
            column = torch.cat(self._across.exchange([flat] * len(columns[0])))
            of_columns = [torch.empty_like(column) for _ in columns]
            self._here.all_gather(described("all-gather", flat.dtype, column.numel()), of_columns, column)
            for ranks, gathered in zip(columns, of_columns, strict=True):
                for rank, row in zip(ranks, gathered.chunk(len(ranks)), strict=True):
                    rows[rank].copy_(row)
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
        elif (columns := self._columns_for(fold)) and flat.numel():
            of_columns = [torch.cat([seen[rank] for rank in ranks]) for ranks in columns]
            folded = torch.empty_like(of_columns[0])
            what = described("reduce-scatter", flat.dtype, folded.numel(), fold.name)
            self._here.reduce_scatter(what, folded, of_columns, fold)
            fold.all_of(self._across.exchange(folded.chunk(len(columns[0]))), values, self._num_ranks)
        else:
            received = [torch.empty_like(values) for _ in seen]
            self._all_to_all_over_gloo(received, seen)
            fold.all_of(received, values, self._num_ranks)
        write_back(flat, output)

    def _columns_for(self, fold: Fold) -> list[tuple[int, ...]]:
        """Return the columns whose sums are folded first within hosts, then between them; none if that rounds twice."""
        return [] if fold.averages or fold.widens else self._across.columns

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
        """Exchange through flat buffers, because Gloo has all-to-all for one tensor only."""
        flat = torch.cat([bytes_of(row) for row in inputs])
        sizes = [[row.nbytes for row in rows] for rows in (outputs, inputs)]
        received = flat.new_empty(sum(sizes[0]))
        self._inner.alltoall_base(received, flat, *sizes, AllToAllOptions()).wait()
        for output, part in zip(outputs, received.split(sizes[0]), strict=True):
            bytes_of(output).copy_(part)

    def on_all_vectors(self, kind: str, tensor: Tensor, perform: Callable[[SharedVectors], None]) -> None:
        """Let every rank work on its share of all ranks' vectors. All ranks are on one host."""
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
