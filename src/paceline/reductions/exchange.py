"""Means of tensors over the ranks, folded in single precision where they have 16 bits, on any process group."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from paceline.process_group import NAME as OURS
from paceline.reductions.collectives import backend_of, launch_gather, launch_sum
from paceline.reductions.pending import PendingWork
from paceline.reductions.traffic import all_reduced

NARROW = (torch.float16, torch.bfloat16)


def launch_mean(tensor: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
    """Start taking the mean over the ranks; 16-bit numbers are folded in float32 and rounded once.

    Args:
        tensor: Floating, contiguous, shape (n,); may be overwritten.
        group: Over whom.

    Returns:
        A function that waits and returns the mean, in the tensor's dtype. It may start another collective, so the
        functions must be called in the order of the launches, with no other collective in between.

    Contract:
        Collective.  Afterwards: bitwise equal on all ranks.

    Cost:
        `all_reduced` bytes a rank. In 16 bits: on the backend `paceline` one all-reduce, which folds in float32; on two
        ranks one gather; otherwise an all-to-all of shares, each folded by one rank, and a gather of the results.
        That is as much as a ring sends, which would round after every one of its P-1 additions (Gloo, NCCL).
    """
    num_ranks = group.size()
    if num_ranks == 1:
        return lambda: tensor
    if tensor.dtype not in NARROW:
        pending = launch_sum(tensor, group)
        return lambda: _waited(pending, tensor).div_(num_ranks)
    if backend_of(group) == OURS:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.AVG  # type: ignore[assignment]
        averaging = PendingWork(group.allreduce([tensor], options))
        return lambda: _waited(averaging, tensor)
    if num_ranks == 2 or not _has_all_to_all(group):
        return _gather_and_fold(tensor, group)
    return _fold_shares(tensor, group)


def sent_for_mean(num_bytes: int, num_ranks: int) -> int:
    """What each rank sends for a mean of so many bytes."""
    return all_reduced(num_bytes, num_ranks)


def _waited(pending: PendingWork, tensor: Tensor) -> Tensor:
    pending.wait()
    return tensor


def _gather_and_fold(tensor: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
    rows = [torch.empty_like(tensor) for _ in range(group.size())]
    pending = launch_gather(rows, tensor, group)

    def finish() -> Tensor:
        pending.wait()
        return _folded(rows).to(tensor.dtype)

    return finish


def _fold_shares(tensor: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
    """Everybody folds one share of everybody's tensor, and tells the result to all."""
    num_ranks, num_elements = group.size(), tensor.numel()
    share = -(-num_elements // num_ranks)
    padded = torch.nn.functional.pad(tensor, (0, share * num_ranks - num_elements))
    received = torch.empty_like(padded)
    # As bytes: Gloo exchanges few types, and nothing is computed on the way.
    byte = torch.uint8
    work = group.alltoall_base(received.view(byte), padded.view(byte), [], [], dist.AllToAllOptions())

    def finish() -> Tensor:
        work.wait()
        mine = _folded(list(received.split(share))).to(tensor.dtype)
        rows = list(padded.split(share))
        launch_gather(rows, mine, group).wait()
        return padded[:num_elements]

    return finish


def _folded(rows: list[Tensor]) -> Tensor:
    """The mean, in float32, folded in rank order."""
    total = rows[0].float()
    for row in rows[1:]:
        total.add_(row.float())
    return total.div_(len(rows))


def _has_all_to_all(group: ProcessGroup) -> bool:
    return type(group) is ProcessGroup
