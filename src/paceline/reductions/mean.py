"""The mean over ranks: gradients are scaled by 1/P, then buckets are all-reduced, in their dtype or a narrower one."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from paceline.comm.collectives import Chain, Done, Work, all_reduce
from paceline.reductions.reduction import Message, Reduction


class Mean(Reduction):
    """The arithmetic mean, scaled before the sum, so that half precision does not overflow in the sum.

    Cost:
        One all-reduce for each bucket. With two ranks bitwise what torch's DDP computes.

    Source:
        Li et al., VLDB 2020, Algorithm 1.
    """

    pieces_at_once = (
        2  # what Gloo performs at once; a third would wait in its queue, where nothing can overtake it
    )

    @property
    def carries_words(self) -> bool:
        return True

    def launch(self, message: Message) -> Work:
        if message.process_group.size() == 1:
            return Done()
        return all_reduce(message.flat, message.process_group)


class NarrowMean(Reduction):
    """The mean over ranks, summed in a narrower dtype: half the bytes, with its precision and range.

    Args:
        dtype: In which buckets are summed.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def launch(self, message: Message) -> Work:
        narrow = message.body.to(self._dtype)
        is_alone = message.process_group.size() == 1
        pending = Done() if is_alone else all_reduce(narrow, message.process_group)

        def stages() -> Iterator[Work]:
            yield pending
            message.body.copy_(narrow)

        return Chain(stages(), num_stages=1)
