"""The mean of a tensor over the ranks, summed in rank order and 16-bit elements in float32, on any process group."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from paceline.comm.collectives import (
    C10dWork,
    all_gather,
    all_reduce,
    all_reduce_mean,
    all_to_all,
    can_all_to_all,
    shares_memory,
)
from paceline.comm.device import keep_for_current_streams
from paceline.compression import accumulation_dtype

_NARROW = (torch.float16, torch.bfloat16)


def launch_mean(tensor: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
    """Start taking the mean over the ranks: summed in rank order, 16-bit elements in float32 and rounded once.

    The returned function waits and returns the mean, in the tensor's dtype; it starts no collective. It may run on
    another stream than this one.

    Contract:
        Collective: every rank, same order.  Blocks: until the all-to-all is done, where there is one.  Mutates:
        `tensor`.  Afterwards: bitwise equal on all ranks.

    Cost:
        `all_reduced` bytes a rank in every case. On two ranks one all-reduce, or in 16 bits one all-gather. On more a
        reduce-scatter, as an all-to-all whose chunks each rank sums, and an all-gather. A ring all-reduce sends as
        much, but in 16 bits it rounds after each of its P-1 additions (Gloo, NCCL), and its order of additions depends
        on where an element lies in the message, so on how buckets are cut. Within one host the backend `paceline` sums
        16-bit elements in float32 itself; its order of additions depends on the position, too.
    """
    num_ranks = group.size()
    if num_ranks == 1:
        return lambda: tensor
    is_narrow = tensor.dtype in _NARROW
    if is_narrow and shares_memory(group):
        # Between hosts this backend sends partial sums of 16-bit numbers in 32 bits.
        averaging = all_reduce_mean(tensor, group)
        return lambda: _waited(averaging, tensor)
    if num_ranks > 2 and can_all_to_all(group):
        return _fold_shares(tensor, group)
    if is_narrow:
        return _gather_and_fold(tensor, group)
    pending = all_reduce(tensor, group)
    return lambda: _waited(pending, tensor).div_(num_ranks)


def _waited(pending: C10dWork, tensor: Tensor, *others: Tensor) -> Tensor:
    """Wait; whatever the collective used stays until this thread's stream is done with it."""
    pending.wait()
    if not tensor.is_cpu:
        keep_for_current_streams([tensor, *others])
    return tensor


def _gather_and_fold(tensor: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
    rows = [torch.empty_like(tensor) for _ in range(group.size())]
    pending = all_gather(rows, tensor, group)

    def finish() -> Tensor:
        _waited(pending, tensor, *rows)
        return _folded(rows).to(tensor.dtype)

    return finish


def _fold_shares(tensor: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
    """Reduce-scatter by an all-to-all, in rank order; then all-gather."""
    num_ranks, num_elements = group.size(), tensor.numel()
    share = -(-num_elements // num_ranks)
    padded = torch.nn.functional.pad(tensor, (0, share * num_ranks - num_elements))
    received = torch.empty_like(padded)
    # As bytes: Gloo's all-to-all supports few dtypes, and nothing is computed on the way.
    byte = torch.uint8
    all_to_all(received.view(byte), padded.view(byte), group).wait()
    mine = _folded(list(received.split(share))).to(tensor.dtype)
    gathering = all_gather(list(padded.split(share)), mine, group)
    return lambda: _waited(gathering, padded[:num_elements], mine)


def _folded(rows: list[Tensor]) -> Tensor:
    """The mean of the rows, summed in order; of 16-bit elements in float32."""
    wide = accumulation_dtype(rows[0].dtype)
    total = rows[0].to(wide, copy=True)
    for row in rows[1:]:
        total.add_(row.to(wide))
    return total.div_(len(rows))
