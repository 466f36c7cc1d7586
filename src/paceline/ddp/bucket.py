"""The interface of a bucket: gradients that are reduced together, in one message; dense or sparse."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from paceline.comm.collectives import Work
from paceline.reductions import Reduction


class Bucket(ABC):
    """Gradients of some parameters. In a backward: `arm`, touches, `collect`, `launch`, `attach`."""

    size_bytes = 0  # of this rank's gradients
    num_large = 0  # the first so many slots hold gradients that are worth a copy of their own
    words: Tensor | None = None  # room behind the gradients for status words, which are summed with them

    def __init__(self, index: int, members: Sequence[int], parameters: Sequence[Parameter]) -> None:
        self.index = index  # place in the launch order
        self.members = list(members)  # parameter indices, by slot
        self.parameters = list(parameters)  # the members' parameters
        self.touched: list[Tensor] = []  # parameters as autograd finished them; the hooks hold this very list
        self.expected = 1  # touches that make it full; 1 while idle: the first touch wakes the reducer
        # Whether the message of this backward has been made; whether it was launched the flight knows.
        self.is_collected = False
        # No rank needs it in this backward, so that it is not collected. Until the next one is armed.
        self.left_out = False
        self.ready_s = 0.0  # when it was full, or backward had ended; 0.0 before
        # From `collect` on: NaN if gradients of this rank are not finite, as far as seen, else zero; or None.
        self.not_finite: Tensor | None = None
        self._num_touched_at_collect = 0

    # ---- before and during a backward

    def arm(self, expected: int) -> None:
        """Start a backward that will touch it so often: nothing touched yet."""
        self.touched.clear()
        self.expected = expected
        self.is_collected = self.left_out = False
        self.ready_s, self.not_finite = 0.0, None

    def expect(self, touches: int) -> None:
        """From now on so many touches make it full."""
        self.expected = touches

    def note_ready(self, ready_s: float) -> None:
        """It is full, or backward has ended."""
        self.ready_s = ready_s

    def leave_out(self) -> None:
        """No rank needs it in this backward: it will not be collected; whatever touches it is late."""
        self.left_out, self._num_touched_at_collect = True, 0

    def disarm(self) -> None:
        """No backward is under way."""
        self.expected = 1
        self.touched.clear()
        self.is_collected = False

    @abstractmethod
    def touched_slots(self) -> list[int]:
        """Slots as autograd finished them; one may occur more than once."""

    @abstractmethod
    def slots_with_gradients(self) -> set[int]:
        """Slots that autograd finished with a gradient; it may also find out that there is none."""

    @abstractmethod
    def is_complete(self) -> bool:
        """Whether the touches counted came from as many different parameters (no parameter twice, another never)."""

    def enter(self, slot: int, scale: float) -> None:  # noqa: B027  a sparse one has no buffer
        """Take in a large gradient that autograd has just finished."""

    def accumulate(self, slot: int) -> None:  # noqa: B027
        """In a backward that is not synchronized: keep a large gradient in the buffer, unscaled."""

    # ---- reduction

    @abstractmethod
    def collect(self, scale: float, mean_scale: float, used_before: set[int], has_ended: bool) -> None:
        """Make the message: bring every gradient in, scaled, and take `.grad` away from every parameter.

        `scale` is for dense gradients on their way into the bucket; `mean_scale` for sparse and late ones, which are
        always averaged. `used_before`: parameters that earlier backwards of this step touched; `has_ended`: autograd
        writes no more.
        """

    @abstractmethod
    def launch(self, reduction: Reduction, group: ProcessGroup, is_last: bool) -> Work:
        """Start reducing the message. Collective; does not wait."""

    @abstractmethod
    def attach(self, is_used: Callable[[int], bool]) -> None:
        """Give every parameter its reduced gradient; those left out, or not `is_used` on any rank, keep theirs."""

    # ---- unused parameters and late gradients

    @abstractmethod
    def untouched_members(self) -> list[int]:
        """Parameters that this rank's step has not used so far: of a bucket that was collected, or is left out."""

    def has_late_gradients(self) -> bool:
        """Whether autograd has touched it after `collect`, or though it is left out."""
        return (self.is_collected or self.left_out) and len(self.touched) > self._num_touched_at_collect

    @abstractmethod
    def launch_late(self, scale: float, group: ProcessGroup) -> Work:
        """Start summing what arrived late over the ranks, to be added when done. Collective; does not wait."""

    # ---- between backwards

    def drop_installed(self) -> None:  # noqa: B027
        """After a backward without synchronization: gradients that stayed untouched are None again."""

    @abstractmethod
    def take_over(self, gradients: Mapping[int, Tensor]) -> None:
        """Be the home of gradients that lived elsewhere, by their parameters' `id`; others are not ours."""
