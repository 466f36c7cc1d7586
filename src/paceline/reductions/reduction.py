"""The seam between *when* a bucket leaves and *what* combining means."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from paceline.comm.pending import Pending
from paceline.errors import ConfigurationError
from paceline.observe import StepTiming
from paceline.reductions.sparse import launch_sparse_sum


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


class Reduction(ABC):
    """How the ranks' buckets become one. Final classes implement `launch` and override what differs.

    An object belongs to one model: it may keep state, such as what compression left out.
    """

    is_ours: bool = True
    """Whether an exception at launch means that communication failed, not that a user's code raised."""

    is_linear: bool = True
    """Whether reducing two parts of a gradient one after the other is as good as reducing their sum."""

    def __repr__(self) -> str:
        """Its kind and settings, equal on all ranks: how ranks that were given different ones find out."""
        return type(self).__name__

    def prepare(self, named_parameters: Mapping[str, Parameter], process_group: ProcessGroup) -> None:  # noqa: B027  most have nothing to do
        """Get to know the model, before the first step and again whenever its parameters change.

        Args:
            named_parameters: What will be reduced, in registration order; the same on every rank.
            process_group: Over whom.

        Contract:
            Local.

        Raises:
            ConfigurationError: These parameters or this group cannot be reduced so. Nothing has begun.
        """

    @property
    def carries_words(self) -> bool:
        """Whether the words behind the gradients come back as exact sums; otherwise they are sent by themselves.

        Constant from `begin_step` to the end of the step.
        """
        return False

    def begin_step(self) -> None:  # noqa: B027  most have nothing to do
        """A synchronized backward begins. Local."""

    def input_scale(self, num_ranks: int) -> float:
        """What each rank multiplies its gradients by on their way into the bucket; asked after `begin_step`."""
        return 1.0 / num_ranks

    @abstractmethod
    def launch(self, message: Message) -> Pending:
        """Start reducing `message.flat` in place.

        Contract:
            Collective: every rank, same order.  Blocks: no.  Mutates: `message.flat`, until the result is done.
        """

    def launch_sparse(
        self, gradient: Tensor, process_group: ProcessGroup, keep: Callable[[Tensor], None]
    ) -> Pending:
        """Start taking the mean of sparse gradients, which are scaled already; as `launch_sparse_sum`."""
        return launch_sparse_sum(gradient, process_group, keep)

    def withdraw(self, parameters: Sequence[Parameter]) -> None:  # noqa: B027  most have nothing to do
        """No rank used these in the step that ends: what was reduced for them is dropped. Local; before `end_step`."""

    def end_step(self, timing: StepTiming) -> None:  # noqa: B027  most have nothing to do
        """A synchronized backward has ended well, with these timings on this rank. Local."""

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: to be saved by every rank, and loaded by the same rank. Local."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned. Local.

        Raises:
            ConfigurationError: It is the state of another kind of reduction, rank or model; nothing was changed.
        """
        if state:
            raise ConfigurationError(
                f"{type(self).__name__} keeps no state, but was given one with the keys {', '.join(sorted(state))}. "
                "Load it into the reduction that saved it."
            )
