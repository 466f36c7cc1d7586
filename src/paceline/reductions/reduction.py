"""The interface that `ddp` calls to combine the ranks' gradient buckets, dense or sparse; and the mean."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from paceline.comm.collectives import Chain, Work, all_reduce, backend_of
from paceline.errors import ConfigurationError
from paceline.observe import StepTiming


@dataclass(frozen=True)
class Traffic:
    """The bytes that one rank sent."""

    sent_bytes: int = 0  # for gradients, as payloads
    # what an all-reduce of the same gradients sends that is optimal in bytes, 2 (P-1)/P of their size
    plain_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent_bytes + other.sent_bytes, self.plain_bytes + other.plain_bytes)

    @property
    def saved_bytes(self) -> int:
        """Return the bytes that compression saves. Negative if messages are longer, as when many ranks gather."""
        return self.plain_bytes - self.sent_bytes


def all_reduced(num_bytes: int, num_ranks: int) -> int:
    """Return the bytes that each rank sends when so many are all-reduced."""
    return 2 * (num_ranks - 1) * num_bytes // num_ranks


def gathered(num_bytes: int, num_ranks: int) -> int:
    """Return the bytes that each rank sends when each receives so many from each other."""
    return (num_ranks - 1) * num_bytes


@dataclass(frozen=True)
class Message:
    """One bucket, passed to a reduction, which owns its tensors until it is done.

    Attributes:
        index: The bucket's place in launch order; the same on every rank.
        is_last: Whether it is the last one of this backward.
        flat: Real, contiguous, shape (N,): the gradients and, if the reduction `carries_status`, a trailer of
            status numbers that are summed with them.
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
        """Return the gradients without the trailer: a view of `flat`, shape (num_gradient_elements,)."""
        return self.flat[: self.num_gradient_elements]


@dataclass(frozen=True)
class StepEnd:
    """The end of a synchronized backward without error on all ranks, as a reduction is told of it.

    Attributes:
        timing: This rank's times of the step. Where a device computes, they are taken before the device is done.
        unused: Parameters that no rank has used in this step. What the step changed in their state has to be dropped.
        settle: Waits for the device, then returns the step's true times. None: `timing` is true already.
    """

    timing: StepTiming
    unused: Sequence[Parameter] = ()
    settle: Callable[[], StepTiming] | None = None

    def settled_timing(self) -> StepTiming:
        """Return the step's true times. Waits for the device if one computes."""
        return self.timing if self.settle is None else self.settle()


class Reduction(ABC):
    """Combines the ranks' buckets: `launch` is required, all else has a default. docs/guide/write-a-reduction.md.

    An object belongs to one model: it may keep state, such as the residuals of compression. `repr` has to give the
    class and its settings, equal on all ranks: ranks with different ones raise.
    """

    is_linear: bool = True
    """Whether reducing two parts of a gradient one after the other gives what reducing their sum gives."""

    needs_all_buckets: bool = False
    """Whether every rank has to launch every bucket in every step. False: those that no rank needs may be left out."""

    pieces_at_once: int = 0
    """How many pieces of buckets may be under way, launched in one order on every rank. 0: whole buckets only.

    Threads of the network may launch pieces, and all pieces of a bucket are launched in a step.
    """

    carries_status: bool = False
    """Whether `launch` returns exact sums of the status behind the gradients, too. False: `ddp` sends it separately.

    Constant from `begin_step` to the end of the step.
    """

    def __repr__(self) -> str:
        return type(self).__name__

    def prepare(self, named_parameters: Mapping[str, Parameter], process_group: ProcessGroup) -> None:  # noqa: B027  most have nothing to do
        """Set up for a model: before the first step, and again whenever its parameters change. Local.

        Args:
            named_parameters: The parameters whose gradients will be reduced, in registration order; the same on every
                rank.
            process_group: The ranks.

        Raises:
            ConfigurationError: This reduction does not support these parameters or this group. Nothing was launched.
        """

    def why_not_over(self, process_group: ProcessGroup | None) -> str:
        """Return why this reduction cannot go on over another group, and what to do instead; "" if it can. Local.

        Args:
            process_group: The other group. None: whichever ranks are left after some were lost (`Elastic`).
        """
        return ""

    def follow(
        self, named_parameters: Mapping[str, Parameter], process_group: ProcessGroup, are_alike: bool
    ) -> None:
        """Reduce over other ranks from now on. What this rank keeps of its own gradients stays.

        Args:
            named_parameters: As in `prepare`.
            process_group: The ranks that there are now. `why_not_over` had nothing against them.
            are_alike: All of them have made the same steps with this model. If not, some are new or behind, so state
                that must be equal begins again on all ranks.

        Contract:
            Local; on every rank between the same steps. Collectives over the old group may still be under way.
        """
        self.prepare(named_parameters, process_group)

    def begin_step(self, num_ranks: int, active_ratio: float = 1.0, share: float | None = None) -> float:
        """Begin a synchronized backward, and return the factor of its gradients on their way into buckets. Local.

        Args:
            num_ranks: By how many ranks' gradients the sum is divided; fewer than the group has if some have no data.
            active_ratio: The fraction of the ranks that have samples in this step.
            share: The fraction of the step's samples that this rank has. None: the step is not weighed.
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
        """Start summing a sparse gradient, scaled already; arguments as in `launch_sparse_sum`."""
        return launch_sparse_sum(gradient, process_group, keep)

    def end_step(self, ended: StepEnd) -> None:  # noqa: B027  most have nothing to do
        """End a synchronized backward, after all its buckets are done. Not called for one that failed. Local."""

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, to be saved by every rank and loaded by the same rank. Local."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. Local. ConfigurationError for the state of another reduction or model."""
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

    # What Gloo performs at once. A third would wait in its queue, where nothing can overtake it.
    pieces_at_once = 2
    carries_status = True

    def launch(self, message: Message) -> Work:
        if message.process_group.size() == 1:
            return Chain()
        return all_reduce(message.flat, message.process_group)


class NarrowMean(Reduction):
    """The mean over ranks, summed in a narrower dtype: half the bytes, with its precision and range."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def launch(self, message: Message) -> Work:
        narrow = message.body.to(self._dtype)
        is_alone = message.process_group.size() == 1
        pending = Chain() if is_alone else all_reduce(narrow, message.process_group)

        def stages() -> Iterator[Work]:
            yield pending
            message.body.copy_(narrow)

        return Chain(stages(), num_stages=1)


def real_numel(tensor: Tensor) -> int:
    """Return the number of real elements of a tensor, or of its gradient: a complex element counts as two."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def launch_sparse_sum(gradient: Tensor, group: ProcessGroup, keep: Callable[[Tensor], None]) -> Work:
    """Start summing a sparse COO gradient over the ranks. Collective: every rank, same order; does not wait.

    This rank's is scaled already, coalesced and sparse in its first dimension; it is left unchanged. `keep` is called
    with the sum, sparse and coalesced, by the `wait` that completes it. On Gloo it takes an all-gather of indices and
    values, elsewhere an all-reduce of the dense gradient.
    """
    if group.size() == 1:
        return Chain(_kept(Chain(), gradient, keep), num_stages=1)
    total = gradient.clone() if _can_sum_sparse(group, gradient) else gradient.to_dense()
    return Chain(_kept(all_reduce(total, group), total, keep), num_stages=1)


def _kept(pending: Work, total: Tensor, keep: Callable[[Tensor], None]) -> Iterator[Work]:
    yield pending
    keep((total if total.is_sparse else total.to_sparse(1)).coalesce())


def _can_sum_sparse(group: ProcessGroup, gradient: Tensor) -> bool:
    return gradient.device.type == "cpu" and backend_of(group) == "gloo"
