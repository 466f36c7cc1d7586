"""The seam between *when* a bucket leaves and *what* combining means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from paceline.reductions.pending import Pending


@dataclass(frozen=True)
class Message:
    """One bucket, handed over for reduction; nobody else touches its tensors until the reduction is done.

    Attributes:
        index: Which bucket; the same on every rank.
        is_last: Whether it is the last one of this backward.
        flat: Real, contiguous, shape (N,): gradients and, behind them, words that are summed along with them.
        num_gradient_elements: How many leading elements of `flat` are gradients.
        gradients: Views of `flat`, one a parameter.
        parameters: Their parameters.
        process_group: Over whom.
    """

    index: int
    is_last: bool
    flat: Tensor
    num_gradient_elements: int
    gradients: Sequence[Tensor]
    parameters: Sequence[Parameter]
    process_group: ProcessGroup

    @property
    def body(self) -> Tensor:
        return self.flat[: self.num_gradient_elements]


class Reduction(Protocol):
    """How the ranks' buckets become one. Final classes implement it."""

    @property
    def is_ours(self) -> bool:
        """Whether an exception at launch means that communication failed, not that a user's code raised."""

    @property
    def carries_words(self) -> bool:
        """Whether the words behind the gradients come back as exact sums; otherwise they are sent by themselves."""

    def input_scale(self, num_ranks: int) -> float:
        """What each rank multiplies its gradients by on their way into the bucket."""

    def launch(self, message: Message) -> Pending:
        """Start reducing `message.flat` in place.

        Contract:
            Collective: every rank, same order.  Blocks: no.  Mutates: `message.flat`, until the result is done.
        """
