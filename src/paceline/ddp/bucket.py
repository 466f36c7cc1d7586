"""The interface of a bucket: gradients that are reduced together, in one message; dense or sparse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from paceline.comm.collectives import Work
from paceline.reductions import Reduction


class Bucket(Protocol):
    """Gradients of some parameters. In a backward: `arm`, touches, `collect`, `launch`, `attach`."""

    index: int  # place in the launch order
    members: list[int]  # parameter indices, by slot
    parameters: list[Parameter]  # the members' parameters
    num_large: int  # the first so many slots hold gradients that are worth a copy of their own
    touched: list[Tensor]  # parameters as autograd finished them; the hooks hold this very list
    expected: int  # touches that make it full; 1 while idle: the first touch wakes the reducer
    # Whether the message of this backward has been made; whether it was launched the sync knows.
    is_collected: bool
    # No rank needs it in this backward, so that it is not collected. Until the next one is armed.
    left_out: bool
    ready_s: float  # when it was full, or backward had ended; 0.0 before
    # From `collect` on: NaN if gradients of this rank are not finite, as far as seen, else zero; or None.
    not_finite: Tensor | None

    @property
    def size_bytes(self) -> int:
        """Bytes of this rank's gradients."""

    @property
    def words(self) -> Tensor | None:
        """Room behind the gradients for status words, which are summed with them; None: there is none."""

    # ---- before and during a backward

    def arm(self, expected: int) -> None:
        """Start a backward that will touch it so often: nothing touched yet."""

    def expect(self, touches: int) -> None:
        """From now on so many touches make it full."""

    def mark_ready(self, ready_s: float) -> None:
        """It is full, or backward has ended."""

    def leave_out(self) -> None:
        """No rank needs it in this backward: it will not be collected; whatever touches it is late."""

    def disarm(self) -> None:
        """No backward is under way."""

    def touched_slots(self) -> list[int]:
        """Slots as autograd finished them; one may occur more than once."""

    def slots_with_gradients(self) -> set[int]:
        """Slots that autograd finished with a gradient; it may also find out that there is none."""

    def is_complete(self) -> bool:
        """Whether the touches counted came from as many different parameters (no parameter twice, another never)."""

    def enter(self, slot: int, scale: float) -> None:
        """Take in a large gradient that autograd has just finished."""

    def accumulate(self, slot: int) -> None:
        """In a backward that is not synchronized: keep a large gradient in the buffer, unscaled."""

    # ---- reduction

    def collect(self, scale: float, mean_scale: float, used_before: set[int], has_ended: bool) -> None:
        """Make the message: bring every gradient in, scaled, and take `.grad` away from every parameter.

        `scale` is for dense gradients on their way into the bucket; `mean_scale` for sparse and late ones, which are
        always averaged. `used_before`: ids of parameters that earlier backwards of this step touched; `has_ended`:
        autograd writes no more.
        """

    def launch(self, reduction: Reduction, group: ProcessGroup, is_last: bool) -> Work:
        """Start reducing the message. Collective; does not wait."""

    def attach(self, is_used: Callable[[int], bool]) -> None:
        """Give every parameter its reduced gradient; those left out, or not `is_used` on any rank, keep theirs."""

    # ---- unused parameters and late gradients

    def untouched_members(self) -> list[int]:
        """Parameters that this rank's step has not used so far: of a bucket that was collected, or is left out."""

    def has_late_gradients(self) -> bool:
        """Whether autograd has touched it after `collect`, or though it is left out."""

    def launch_late(self, scale: float, group: ProcessGroup) -> Work:
        """Start summing what arrived late over the ranks, to be added when done. Collective; does not wait."""

    # ---- between backwards

    def drop_unwritten(self) -> None:
        """After a backward without synchronization: gradients that stayed untouched are None again."""

    def take_over(self, gradients: Mapping[int, Tensor]) -> None:
        """Be the home of gradients that lived elsewhere, by their parameters' `id`; others are not ours."""
