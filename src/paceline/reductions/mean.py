"""The mean over ranks: every rank scales its gradients by 1/P, then the buckets are summed."""

from __future__ import annotations

import torch.distributed as dist

from paceline.reductions.pending import Done, Pending, PendingWork
from paceline.reductions.reduction import Message


class Mean:
    """The arithmetic mean, scaled before the sum, so that half precision does not overflow in the sum.

    Cost:
        One all-reduce a bucket. With two ranks bitwise what torch's DDP computes.

    Source:
        Li et al., VLDB 2020, Algorithm 1.
    """

    carries_words = True

    def input_scale(self, num_ranks: int) -> float:
        return 1.0 / num_ranks

    def launch(self, message: Message) -> Pending:
        if message.process_group.size() == 1:
            return Done()
        work = dist.all_reduce(message.flat, group=message.process_group, async_op=True)
        return PendingWork(work)
