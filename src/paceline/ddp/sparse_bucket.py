"""A bucket of one sparse gradient, reduced alone: as coordinates and values, or dense where the backend must."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from paceline.comm.collectives import Work
from paceline.reductions import Reduction
from paceline.reductions.reduction import launch_sparse_sum


class SparseBucket:
    """One parameter whose gradient is a sparse COO tensor (`nn.Embedding(sparse=True)`).

    A `Bucket` without a buffer: the gradient stays where autograd put it until it is reduced.
    """

    def __init__(self, index: int, member: int, parameter: Parameter) -> None:
        self.index = index
        self.members = [member]
        self.parameters = [parameter]
        self.message = torch.empty(0)  # the reduced gradient, once it is there
        self.words: Tensor | None = None
        self.not_finite: Tensor | None = None  # not looked at: dense gradients show it as well
        self.size_bytes = 0
        self.num_large = 0
        self.finished: list[Tensor] = []
        self.num_expected = 1
        self.has_message = self.is_skipped = False
        self.ready_s = 0.0
        self._used = False
        self._kept: Tensor | None = None
        self._num_finished_before = 0

    def arm(self, num_expected: int) -> None:
        self.finished.clear()
        self.num_expected = num_expected
        self.has_message = self.is_skipped = False
        self.ready_s = 0.0

    def expect(self, count: int) -> None:
        self.num_expected = count

    def mark_ready(self, ready_s: float) -> None:
        self.ready_s = ready_s

    def skip(self) -> None:
        self.is_skipped, self._used, self._num_finished_before = True, False, 0

    def disarm(self) -> None:
        self.arm(num_expected=1)

    def finished_slots(self) -> list[int]:
        return [0] * len(self.finished)

    def slots_with_gradients(self) -> set[int]:
        return {0} if self.finished and self.parameters[0].grad is not None else set()

    def is_complete(self) -> bool:
        return len(self.finished) == 1

    def copy_in(self, slot: int, scale: float) -> None:
        """Leave the gradient where it is until `make_message`."""

    def accumulate(self, slot: int) -> None:
        """Ignore the gradient: there is no buffer."""

    def make_message(self, scale: float, mean_scale: float, used_before: set[int], has_ended: bool) -> None:
        parameter = self.parameters[0]
        self._num_finished_before = len(self.finished)
        self._used = bool(self.slots_with_gradients()) or id(parameter) in used_before
        self._kept = None if self._used else parameter.grad
        self.message = _scaled(_as_sparse(parameter), mean_scale)
        self.size_bytes = self.message._values().numel() * self.message._values().element_size()
        parameter.grad = None
        self.has_message, self.is_skipped = True, False

    def launch(self, reduction: Reduction, group: ProcessGroup, is_last: bool) -> Work:
        return reduction.launch_sparse(self.message, group, self._keep_reduced)

    def _keep_reduced(self, reduced: Tensor) -> None:
        self.message = reduced

    def set_gradients(self, is_used: Callable[[int], bool]) -> None:
        if self.is_skipped:
            return
        is_reduced = self._used or is_used(self.members[0])
        self.parameters[0].grad = self.message if is_reduced else self._kept

    def unused_members(self) -> list[int]:
        self._used = self._used or self.has_late_gradients()
        return [] if self._used else list(self.members)

    def has_late_gradients(self) -> bool:
        return (self.has_message or self.is_skipped) and len(self.finished) > self._num_finished_before

    def launch_late(self, scale: float, group: ProcessGroup) -> Work:
        late = _scaled(_as_sparse(self.parameters[0]), scale)
        self.parameters[0].grad = None  # as after `make_message`
        return launch_sparse_sum(late, group, self._add_late)

    def _add_late(self, late: Tensor) -> None:
        self.message = (self.message + late).coalesce()

    def drop_unwritten(self) -> None:
        """Return at once: no gradient is ever aliased."""

    def take_over(self, gradients: Mapping[int, Tensor]) -> None:
        gradient = gradients.get(id(self.parameters[0]))
        if gradient is not None:
            self.parameters[0].grad = gradient


def _as_sparse(parameter: Parameter) -> Tensor:
    """Return the gradient as a coalesced COO tensor, sparse in its first dimension; empty if there is none."""
    gradient = parameter.grad
    if gradient is None:
        indices = torch.empty((1, 0), dtype=torch.long, device=parameter.device)
        values = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
        return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False).coalesce()
    return gradient.detach().coalesce() if gradient.is_sparse else gradient.detach().to_sparse(1)


def _scaled(gradient: Tensor, scale: float) -> Tensor:
    """Return the gradient times `scale`. Scale 0 gives 0, even for NaN."""
    return gradient * scale if scale else torch.zeros_like(gradient)
