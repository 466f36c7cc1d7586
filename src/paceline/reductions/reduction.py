"""What `ddp` calls to combine the ranks' gradient buckets, dense or sparse: the interface, and the mean."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from paceline.comm.collectives import Chain, Done, Work, all_reduce, backend_of
from paceline.errors import ConfigurationError
from paceline.observe import StepTiming


@dataclass(frozen=True)
class Message:
    """One bucket, passed to a reduction, which owns its tensors until it is done.

    Attributes:
        index: The bucket's place in launch order; the same on every rank.
        is_last: Whether it is the last one of this backward.
        flat: Real, contiguous, shape (N,): the gradients and, if the reduction `carries_words`, a trailer of control
            words that are summed with them.
        num_gradient_elements: How many leading elements of `flat` are gradients.
        gradients: Views of `flat`, one for each parameter, in its shape and dtype.
        parameters: The parameters, in the order of `gradients`.
        process_group: The ranks.
        start: Where `flat` begins in the bucket, if it is a piece; `gradients` and `parameters` are the bucket's.
    """

    index: int
    is_last: bool
    flat: Tensor
    num_gradient_elements: int
    gradients: Sequence[Tensor]
    parameters: Sequence[Parameter]
    process_group: ProcessGroup
    start: int = 0

    @property
    def body(self) -> Tensor:
        """The gradients without the trailer: a view of `flat`, shape (num_gradient_elements,)."""
        return self.flat[: self.num_gradient_elements]


class Reduction(ABC):
    """Combines the ranks' buckets. Final classes implement `launch` and override what differs.

    An object belongs to one model: it may keep state, such as the residuals of compression.
    """

    is_ours: bool = True
    """Whether an exception of `launch` means that communication failed, not that a user's hook raised."""

    is_linear: bool = True
    """Whether reducing two parts of a gradient one after the other gives what reducing their sum gives."""

    divides_by_all: bool = True
    """Whether a rank that has nothing in a step counts as one with a zero gradient; else as if it were not there."""

    needs_all_buckets: bool = False
    """Whether every step has to launch every bucket, on every rank; else those that no rank needs may be left out."""

    pieces_at_once: int = 0
    """How many pieces of buckets it may be sending, launched in one order on every rank; 0: it takes whole ones only.

    Threads of the network's may launch them, and all pieces of a bucket are launched in a step.
    """

    num_averaged: int | None = None
    """By how many sums are divided, where that is not the number of ranks that take part."""

    why_not_elastic: str = ""
    """Why it cannot go on without lost ranks, and what to do instead, said behind its name; empty: it can."""

    times_steps: bool = False
    """Whether it needs a step's true times in `end_step`, for which the host then waits where a device computes."""

    def __repr__(self) -> str:
        """Class and settings, equal on all ranks: `ddp` compares them, so that ranks with different ones raise."""
        return type(self).__name__

    def prepare(self, named_parameters: Mapping[str, Parameter], process_group: ProcessGroup) -> None:  # noqa: B027  most have nothing to do
        """Set up for a model: before the first step, and again whenever its parameters change.

        Args:
            named_parameters: The parameters whose gradients will be reduced, in registration order; the same on every
                rank.
            process_group: The ranks.

        Contract:
            Local.

        Raises:
            ConfigurationError: This reduction does not support these parameters or this group. Nothing was launched.
        """

    def check_group(self, process_group: ProcessGroup) -> None:  # noqa: B027  most work over any
        """Before anything is changed: raise if this reduction cannot go on over another group. Local.

        Raises:
            ConfigurationError: It cannot; the same on every rank.
        """

    def follow(
        self, named_parameters: Mapping[str, Parameter], process_group: ProcessGroup, are_alike: bool
    ) -> None:
        """Reduce over other ranks from now on. What this rank keeps of its own gradients stays.

        Args:
            named_parameters: As of `prepare`.
            process_group: The ranks that there are now, which `check_group` has let pass.
            are_alike: All of them have made the same steps with this model. If not, some are new or behind, so state
                that must be equal begins again on all ranks.

        Contract:
            Local; on every rank between the same steps. Collectives over the old group may still be under way.
        """
        self.prepare(named_parameters, process_group)

    @property
    def carries_words(self) -> bool:
        """Whether `launch` returns exact sums of the status words, too; otherwise `ddp` sends them separately.

        Constant from `begin_step` to the end of the step.
        """
        return False

    def begin_step(self) -> None:  # noqa: B027  most have nothing to do
        """A synchronized backward begins. Local."""

    def weigh(self, share: float) -> None:  # noqa: B027  most have nothing to do
        """The step that has begun is weighed: this rank's part is the fraction `share` of it. Local."""

    def input_scale(self, num_ranks: int) -> float:
        """The factor that `ddp` multiplies gradients by as it copies them into the bucket; called after `begin_step`.

        Args:
            num_ranks: By how many ranks' gradients the sum is divided; fewer than the group has if some have no data.
        """
        return 1.0 / num_ranks

    @abstractmethod
    def launch(self, message: Message) -> Work:
        """Start reducing `message.flat` in place.

        Returns:
            Done when `message.body` holds the result.

        Contract:
            Collective: every rank, same order.  Blocks: no.  Mutates: `message.flat`, until the returned is done.
        """

    def launch_sparse(
        self, gradient: Tensor, process_group: ProcessGroup, keep: Callable[[Tensor], None]
    ) -> Work:
        """Start reducing a sparse gradient, scaled by `input_scale` already; arguments as of `launch_sparse_sum`."""
        return launch_sparse_sum(gradient, process_group, keep)

    def withdraw(self, parameters: Sequence[Parameter]) -> None:  # noqa: B027  most have nothing to do
        """Drop what this step changed in the state of these parameters: no rank used them. Local; before `end_step`."""

    def end_step(self, timing: StepTiming) -> None:  # noqa: B027  most have nothing to do
        """A synchronized backward has ended without error on all ranks; `timing` is this rank's. Local."""

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, to be saved by every rank and loaded by the same rank. Local."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. Local.

        Raises:
            ConfigurationError: It is the state of another reduction, rank or model; nothing was changed.
        """
        if state:
            raise ConfigurationError(
                f"{type(self).__name__} keeps no state, but was given one with the keys {', '.join(sorted(state))}. "
                "Load it into the reduction that saved it."
            )


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


def real_numel(tensor: Tensor) -> int:
    """The number of real elements of a tensor, or of its gradient: a complex element counts as two."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def launch_sparse_sum(gradient: Tensor, group: ProcessGroup, keep: Callable[[Tensor], None]) -> Work:
    """Start summing a sparse COO gradient over the ranks.

    Args:
        gradient: This rank's, scaled already, coalesced, sparse in its first dimension; unchanged.
        group: The ranks.
        keep: Called with the sum, sparse and coalesced, by the `wait` that completes it.

    Contract:
        Collective: every rank, same order.  Blocks: no.  Mutates: nothing.

    Cost:
        On Gloo an all-gather of indices and values; elsewhere an all-reduce of the dense gradient.
    """
    if group.size() == 1:
        return Chain(_kept(Done(), gradient, keep), num_stages=1)
    total = gradient.clone() if _can_sum_sparse(group, gradient) else gradient.to_dense()
    return Chain(_kept(all_reduce(total, group), total, keep), num_stages=1)


def _kept(pending: Work, total: Tensor, keep: Callable[[Tensor], None]) -> Iterator[Work]:
    yield pending
    keep((total if total.is_sparse else total.to_sparse(1)).coalesce())


def _can_sum_sparse(group: ProcessGroup, gradient: Tensor) -> bool:
    return gradient.device.type == "cpu" and backend_of(group) == "gloo"
