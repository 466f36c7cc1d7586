"""The interface of a bucket, dense or sparse: gradients that are reduced in one message; their layout in its buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from paceline.comm.collectives import Chain, Work, all_reduce
from paceline.reductions import Reduction
from paceline.reductions.reduction import real_numel


class Bucket(Protocol):
    """The gradients that are reduced in one message.

    The reducer calls `arm` when a backward begins, and `make_message`, `launch` and `set_gradients` once gradients are
    finished.
    """

    index: int  # place in the launch order
    members: list[int]  # parameter indices, by slot
    parameters: list[Parameter]  # the members' parameters
    num_large: int  # the first so many slots hold gradients that are worth a copy of their own
    finished: list[Tensor]  # parameters as autograd finished them; the hooks hold this very list
    num_expected: int  # finished gradients that make it full; 1 while idle: the first one wakes the reducer
    # Whether the message of this backward has been made; whether it was launched the sync knows.
    has_message: bool
    # No rank needs it in this backward, so no message is made. Until the next one is armed.
    is_skipped: bool
    ready_s: float  # when it was full, or backward had ended; 0.0 before
    # From `make_message` on: NaN if gradients of this rank are not finite, as far as seen, else zero; or None.
    not_finite: Tensor | None

    @property
    def size_bytes(self) -> int:
        """Return the bytes of this rank's gradients."""

    @property
    def words(self) -> Tensor | None:
        """Return the room behind the gradients for status words, which are summed with them; None if there is none."""

    # ---- before and during a backward

    def arm(self, num_expected: int) -> None:
        """Start a backward that will finish so many gradients; none is finished yet."""

    def expect(self, count: int) -> None:
        """Set the number of finished gradients that make this bucket full."""

    def mark_ready(self, ready_s: float) -> None:
        """Store the time at which this bucket became full, or backward ended."""

    def skip(self) -> None:
        """Leave this bucket out of the backward, because no rank needs it. Gradients that still arrive are late."""

    def disarm(self) -> None:
        """Wait for the next backward: its first touch wakes the reducer."""

    def finished_slots(self) -> list[int]:
        """Return the slots in the order in which autograd finished them. A slot may occur more than once."""

    def slots_with_gradients(self) -> set[int]:
        """Return the slots that autograd finished with a gradient. Autograd may also finish a slot without one."""

    def is_complete(self) -> bool:
        """Return whether each touch came from another parameter: none came twice while another is missing."""

    def copy_in(self, slot: int, scale: float) -> None:
        """Copy a large gradient that autograd has just finished into the buffer, scaled."""

    def accumulate(self, slot: int) -> None:
        """Keep a large gradient in the buffer, unscaled, in a backward that is not synchronized."""

    # ---- reduction

    def make_message(self, scale: float, mean_scale: float, used_before: set[int], has_ended: bool) -> None:
        """Make the message: bring every gradient in, scaled, and take `.grad` away from every parameter.

        `scale` is for dense gradients on their way into the bucket; `mean_scale` for sparse and late ones, which are
        always averaged. `used_before`: ids of parameters that earlier backwards of this step used; `has_ended`:
        autograd writes no more.
        """

    def launch(self, reduction: Reduction, group: ProcessGroup, is_last: bool) -> Work:
        """Start reducing the message. Collective; does not wait."""

    def set_gradients(self, is_used: Callable[[int], bool]) -> None:
        """Give every parameter its reduced gradient; those left out, or not `is_used` on any rank, keep theirs."""

    # ---- unused parameters and late gradients

    def unused_members(self) -> list[int]:
        """Return the parameters that this rank's step has not used so far. Called after `make_message` or `skip`."""

    def has_late_gradients(self) -> bool:
        """Return whether autograd has finished a gradient after `make_message`, or although the bucket is skipped."""

    def launch_late(self, scale: float, group: ProcessGroup) -> Work:
        """Start summing what arrived late over the ranks, to be added when done. Collective; does not wait."""

    # ---- between backwards

    def drop_unwritten(self) -> None:
        """Set unused gradients to None again, after a backward without synchronization."""

    def take_over(self, gradients: Mapping[int, Tensor]) -> None:
        """Copy these gradients, given by their parameters' `id`, into the buffer. Ignore those of other buckets."""


def launch_late(body: Tensor, parameters: Sequence[Parameter], scale: float, group: ProcessGroup) -> Work:
    """Start summing a dense bucket's late gradients over the ranks; added to `body`, reduced, when they are done.

    Without `parameters` this rank contributes zeros. Collective; does not wait; takes `.grad` away.
    """
    late = torch.zeros_like(body)
    for parameter, view in zip(parameters, gradient_views(late, parameters), strict=True):
        if parameter.grad is not None:
            if scale:  # times 0 it is 0, also where it is no number
                view.copy_(parameter.grad.detach()).mul_(scale)
            parameter.grad = None
    return Chain(_added(body, late, group), num_stages=1)


def _added(body: Tensor, late: Tensor, group: ProcessGroup) -> Iterator[Work]:
    yield all_reduce(late, group) if group.size() > 1 else Chain()
    body.add_(late)


def make_skipped_message(bucket: Bucket) -> None:
    """Make the message of a bucket that was left out, of zeros; what has come all the same is late (`skipping` 5).

    So does what was there before: autograd has added to it, here or on another rank.
    """
    bucket.drop_unwritten()
    finished = list(bucket.finished)
    late = [(p, p.grad.detach().clone()) for p in bucket.parameters if p.grad is not None]
    for slot in bucket.slots_with_gradients():
        bucket.parameters[slot].grad = None
    bucket.finished.clear()
    bucket.make_message(0.0, 0.0, set(), has_ended=False)
    bucket.finished.extend(finished or [parameter for parameter, _ in late])
    for parameter, gradient in late:
        parameter.grad = gradient


LARGE_GRADIENT_BYTES = 32 * 1024


def dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the parameter's strides if they leave no gaps (channels_last is kept). Otherwise return similar ones."""
    return torch.empty_like(parameter, device="meta").stride()


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a buffer for gradients of this dtype."""
    return dtype.to_real() if dtype.is_complex else dtype


def is_large(parameter: Tensor) -> bool:
    """Return whether the gradient is worth a copy of its own; small ones are handled together."""
    return parameter.numel() * parameter.element_size() > LARGE_GRADIENT_BYTES


def gradient_views(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Alias consecutive pieces of `flat`, one a parameter, with its shape, dtype and dense strides.

    `flat` is real, contiguous and long enough; all parameters have one dtype. Each view has a version counter of its
    own, so one may be part of a graph while another one is changed.
    """
    storage, offset = flat.untyped_storage(), flat.storage_offset()
    views: list[Tensor] = []
    for parameter in parameters:
        place = offset // 2 if parameter.is_complex() else offset
        alias = torch.empty(0, dtype=parameter.dtype, device=flat.device)
        views.append(alias.set_(storage, place, parameter.shape, dense_strides(parameter)))
        offset += real_numel(parameter)
    return views
