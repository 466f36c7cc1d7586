"""The mean over logical ranks, summed in their order: the same bits, however many ranks compute them.

Rules
1. A rank computes its logical ranks one after another. `put_aside` keeps the gradients of all but the last one, which
   are in the buckets.
2. What a gradient is scaled by does not depend on the number of ranks, and each element is summed in logical order.
3. Every rank sends as many rows of each bucket as the one with the most: zeros where it has fewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.comm.collectives import Chain, Done, Work, all_gather, all_reduce, all_to_all, shares_memory
from paceline.compression import accumulation_dtype
from paceline.reductions.reduction import Message, Reduction


class LogicalMean(Reduction):
    """The mean over `num_averaged` logical ranks, folded in order.

    Args:
        num_averaged: Logical ranks. The same on every rank from the first step on, whatever ranks there are.

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
        """The logical ranks that this one of so many computes."""
        first, stop = (-(-each * self.num_averaged // num_ranks) for each in (rank, rank + 1))
        return range(first, stop)

    def go_to(self, place: int) -> None:
        """What comes is of the logical rank at this place among the rank's own. Local."""
        self._place = place

    def put_aside(self, parameters: Iterable[Parameter], weight: float) -> None:
        """Keep the gradients that there are, to count `weight` in the mean, and take `.grad` away. Local."""
        kept = {each: each.grad.detach().clone() for each in parameters if each.grad is not None}
        self._aside[self._place] = weight / self.num_averaged, kept
        for each in kept:
            each.grad = None

    def forget_parts(self) -> None:
        """The step is over, or given up. Local."""
        self._aside.clear()
        self._place = 0

    def launch(self, message: Message) -> Work:
        group, flat = message.process_group, message.flat
        num_ranks, most = group.size(), -(-self.num_averaged // group.size())
        if num_ranks == self.num_averaged and shares_memory(group):
            return all_reduce(
                flat, group
            )  # folded in the order of ranks: rule 3 of `process_group.host_collectives`
        share = -(-flat.numel() // num_ranks)
        rows = self._rows(message, most, share * num_ranks)
        own = [len(self.of_rank(rank, num_ranks)) for rank in range(num_ranks)]

        def stages() -> Iterator[Work]:
            received = rows
            if num_ranks > 1:
                sent = rows.view(most, num_ranks, share).transpose(0, 1).contiguous()
                received = torch.empty_like(sent)
                # As bytes: Gloo's all-to-all supports few dtypes, and nothing is computed on the way.
                yield all_to_all(received.view(torch.uint8), sent.view(torch.uint8), group)
            parts = received.view(num_ranks, most, share)
            mine = _sum([parts[rank, place] for rank in range(num_ranks) for place in range(own[rank])])
            if num_ranks == 1:
                yield Done()
                flat.copy_(mine)
                return
            whole = flat if flat.numel() == share * num_ranks else flat.new_empty(share * num_ranks)
            yield all_gather(list(whole.split(share)), mine, group)
            if whole is not flat:
                flat.copy_(whole[: flat.numel()])

        return Chain(stages(), num_stages=2 if num_ranks > 1 else 1)

    def _rows(self, message: Message, num_rows: int, length: int) -> Tensor:
        """This rank's gradients, a row for each of its logical ranks; shape (num_rows, length)."""
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


def _sum(rows: list[Tensor]) -> Tensor:
    """Sum in order; 16-bit elements in float32, rounded once. Writes into the first row, if it is wide."""
    wide = accumulation_dtype(rows[0].dtype)
    total = rows[0].to(wide)
    for row in rows[1:]:
        total.add_(row.to(wide))
    return total.to(rows[0].dtype)
