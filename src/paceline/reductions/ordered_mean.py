"""The mean over ranks, or over logical ranks, summed in their order and 16-bit elements in float32.

Rules of `LogicalMean`, whose bits are the same however many ranks compute them
1. A rank computes its logical ranks one after another. `put_aside` keeps the gradients of all but the last one, which
   are in the buckets.
2. The scale of a gradient does not depend on the number of ranks, and each element is summed in logical order.
3. Every rank sends as many rows of each bucket as the rank with the most: zeros where it has fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from paceline.comm.collectives import (
    C10dWork,
    Chain,
    Work,
    all_gather,
    all_reduce,
    all_reduce_mean,
    all_to_all,
    can_all_to_all,
    shares_memory,
)
from paceline.comm.device import keep_for_current_streams
from paceline.compression import accumulation_dtype
from paceline.reductions.reduction import Message, Reduction

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
        much, but in 16 bits it rounds after each of its P-1 additions (Gloo, NCCL). Its order of additions depends on
        where an element lies in the message, so on how buckets are cut. Within one host the backend `paceline` sums
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
        rows = gather_rows(tensor, group)
        return lambda: sum_in_order(rows()).div_(num_ranks).to(tensor.dtype)
    pending = all_reduce(tensor, group)
    return lambda: _waited(pending, tensor).div_(num_ranks)


def _waited(pending: C10dWork, tensor: Tensor, *others: Tensor) -> Tensor:
    """Wait, and keep all that the collective used until this thread's stream is done with it."""
    pending.wait()
    if not tensor.is_cpu:
        keep_for_current_streams([tensor, *others])
    return tensor


def gather_rows(tensor: Tensor, group: ProcessGroup) -> Callable[[], list[Tensor]]:
    """Start gathering every rank's tensor, as `launch_mean` starts a mean."""
    rows = [tensor] if group.size() == 1 else [torch.empty_like(tensor) for _ in range(group.size())]
    pending = None if group.size() == 1 else all_gather(rows, tensor, group)

    def finish() -> list[Tensor]:
        if pending is not None:
            _waited(pending, tensor, *rows)
        return rows

    return finish


def _fold_shares(tensor: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
    """Reduce-scatter by an all-to-all, in rank order; then all-gather."""
    num_ranks, num_elements = group.size(), tensor.numel()
    share = -(-num_elements // num_ranks)
    padded = torch.nn.functional.pad(tensor, (0, share * num_ranks - num_elements))
    received = torch.empty_like(padded)
    _exchange(received, padded, group).wait()
    mine = sum_in_order(list(received.split(share))).div_(num_ranks).to(tensor.dtype)
    gathering = all_gather(list(padded.split(share)), mine, group)
    return lambda: _waited(gathering, padded[:num_elements], mine)


def _exchange(received: Tensor, sent: Tensor, group: ProcessGroup) -> C10dWork:
    """Exchange rows by an all-to-all of bytes, because Gloo's supports few dtypes."""
    return all_to_all(received.view(torch.uint8), sent.view(torch.uint8), group)


def sum_in_order(rows: list[Tensor]) -> Tensor:
    """Sum in order; 16-bit elements in float32. Writes into the first row, if it is wide."""
    wide = accumulation_dtype(rows[0].dtype)
    total = rows[0].to(wide)
    for row in rows[1:]:
        total.add_(row.to(wide))
    return total


class LogicalMean(Reduction):
    """The mean over `num_averaged` logical ranks, whatever ranks there are, folded in order.

    Cost:
        An all-reduce on one host, while each rank has one logical rank. Else a reduce-scatter, as an all-to-all whose
        parts each rank folds, and an all-gather: the same bytes, and more with fewer ranks.
    """

    carries_status = True

    def __init__(self, num_averaged: int) -> None:
        self.num_averaged: int = num_averaged
        self._aside: dict[int, tuple[float, dict[Parameter, Tensor]]] = {}  # by place among this rank's
        self._place = 0  # of the one whose gradients are in the buckets

    def of_rank(self, rank: int, num_ranks: int) -> range:
        """Return the logical ranks that a rank computes, given the number of ranks."""
        first, stop = (-(-each * self.num_averaged // num_ranks) for each in (rank, rank + 1))
        return range(first, stop)

    def go_to(self, place: int) -> None:
        """Compute the logical rank at this place among the rank's own from now on. Local."""
        self._place = place

    def put_aside(self, parameters: Iterable[Parameter], weight: float) -> None:
        """Keep the gradients that there are, to count `weight` in the mean, and take `.grad` away. Local."""
        kept = {each: each.grad.detach().clone() for each in parameters if each.grad is not None}
        scale = weight * self.begin_step(self.num_averaged)  # a quotient has other bits
        self._aside[self._place] = scale, kept
        for each in kept:
            each.grad = None

    def forget_parts(self) -> None:
        """Forget the gradients that were put aside: the step is over, or given up. Local."""
        self._aside.clear()
        self._place = 0

    def launch(self, message: Message) -> Work:
        group, flat = message.process_group, message.flat
        num_ranks, most = group.size(), -(-self.num_averaged // group.size())
        if num_ranks == self.num_averaged and shares_memory(group):
            # Summed in the order of ranks: rule 3 of `process_group.host_collectives`
            return all_reduce(flat, group)
        share = -(-flat.numel() // num_ranks)
        rows = self._rows(message, most, share * num_ranks)
        own = [len(self.of_rank(rank, num_ranks)) for rank in range(num_ranks)]

        def stages() -> Iterator[Work]:
            received = rows
            if num_ranks > 1:
                sent = rows.view(most, num_ranks, share).transpose(0, 1).contiguous()
                received = torch.empty_like(sent)
                yield _exchange(received, sent, group)
            parts = received.view(num_ranks, most, share)
            rows_in_order = [parts[rank, place] for rank in range(num_ranks) for place in range(own[rank])]
            mine = sum_in_order(rows_in_order).to(flat.dtype)
            if num_ranks == 1:
                yield Chain()
                flat.copy_(mine)
                return
            whole = flat if flat.numel() == share * num_ranks else flat.new_empty(share * num_ranks)
            yield all_gather(list(whole.split(share)), mine, group)
            if whole is not flat:
                flat.copy_(whole[: flat.numel()])

        return Chain(stages(), num_stages=2 if num_ranks > 1 else 1)

    def _rows(self, message: Message, num_rows: int, length: int) -> Tensor:
        """Return this rank's gradients, a row for each of its logical ranks; shape (num_rows, length)."""
        flat = message.flat
        if num_rows == 1 and length == flat.numel():
            return flat
        rows = flat.new_zeros(num_rows, length)
        rows[self._place, : flat.numel()] = flat
        for place, (scale, kept) in self._aside.items():
            for parameter, view in zip(message.parameters, message.gradients, strict=True):
                if parameter in kept:
                    start = rows[place].storage_offset() + view.storage_offset() - flat.storage_offset()
                    rows.as_strided(view.shape, view.stride(), start).copy_(kept[parameter])
            rows[place].mul_(scale)
        return rows
