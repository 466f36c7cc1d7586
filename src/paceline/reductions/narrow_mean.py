"""The mean over ranks, summed in a narrower type than the gradients have."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.comm.collectives import launch_sum
from paceline.comm.pending import Done, Pending
from paceline.reductions.reduction import Message, Reduction


class _PendingCast:
    """A low-precision sum under way; widens it when it is there."""

    def __init__(self, inner: Pending, narrow: Tensor, body: Tensor) -> None:
        self._inner = inner
        self._narrow = narrow
        self._body = body

    def wait(self, timeout_s: float | None = None) -> bool:
        if not self._inner.wait(timeout_s):
            return False
        self._body.copy_(self._narrow)
        return True

    def on_done(self, callback: Callable[[], None]) -> None:
        self._inner.on_done(callback)


class NarrowMean(Reduction):
    """The mean over ranks, summed in a narrower type: half the bytes, with its precision and range."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def launch(self, message: Message) -> Pending:
        narrow = message.body.to(self._dtype)
        if message.process_group.size() == 1:
            return _PendingCast(Done(), narrow, message.body)
        return _PendingCast(launch_sum(narrow, message.process_group), narrow, message.body)
