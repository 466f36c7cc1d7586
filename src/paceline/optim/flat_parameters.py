"""Parameters and buffers as flat vectors, one per dtype and device: their values, their changes, their mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from paceline.comm.collectives import Work, all_reduce, broadcast
from paceline.reductions import Message


class FlatParameters:
    """Two flat vectors beside some parameters of one dtype and device."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        real = self._real()
        num_elements = sum(part.numel() for part in real)
        self.kept = torch.empty(num_elements, dtype=real[0].dtype, device=real[0].device)
        """What the parameters were at `take`."""
        self.update = torch.empty_like(self.kept)
        """The change since `take`; after an exchange, the change that all ranks apply instead."""
        self._kept_views = _views(self.kept, real)
        self._update_views = _views(self.update, real)

    def _real(self) -> list[Tensor]:
        """Aliases of the parameters; made anew each time, for `module.to` gives a parameter other memory."""
        return [_real(parameter) for parameter in self.parameters]

    def take(self) -> None:
        """Keep the parameters' values."""
        torch._foreach_copy_(self._kept_views, self._real())

    def put_back(self) -> None:
        """Give the parameters the values that were kept."""
        torch._foreach_copy_(self._real(), self._kept_views)

    def take_update(self) -> None:
        """Take the change since `take`."""
        torch._foreach_copy_(self._update_views, self._real())
        self.update.sub_(self.kept)

    def apply_update(self) -> None:
        """Give the parameters what was kept, changed by `update`, which is used up."""
        self.update.add_(self.kept)
        torch._foreach_copy_(self._real(), self._update_views)

    def message(self, index: int, num_messages: int, process_group: ProcessGroup) -> Message:
        """The update, to be reduced."""
        parameters: Any = self.parameters
        return Message(
            index=index,
            is_last=index == num_messages - 1,
            flat=self.update,
            num_gradient_elements=self.update.numel(),
            gradients=self._update_views,
            parameters=parameters,
            process_group=process_group,
        )


def flatten(parameters: Sequence[Tensor]) -> list[FlatParameters]:
    """One for each dtype and device, in the order of their first parameters."""
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return [FlatParameters(members) for members in alike.values()]


class AveragedBuffers:
    """A model's buffers (batch-norm statistics), averaged over ranks where its parameters are.

    All ranks' are laid out alike. What is no floating-point number (a counter), or one of 8 bits, becomes rank 0's.
    """

    def __init__(self, buffers: Iterable[Tensor], process_group: ProcessGroup) -> None:
        self._flats = flatten([buffer for buffer in buffers if buffer.numel()])
        self._group = process_group

    @property
    def num_bytes(self) -> int:
        return sum(flat.kept.nbytes for flat in self._flats)

    def layout(self) -> list[str]:
        """Return the dtypes and shapes, which have to be equal on all ranks."""
        return [f"{flat.kept.dtype} {tuple(b.shape)}" for flat in self._flats for b in flat.parameters]

    def launch(self) -> list[Work]:
        """Start taking the mean. Collective; does not wait; buffers are not changed before `finish`."""
        return [] if self._group.size() == 1 else [self._launch(flat) for flat in self._flats]

    def _launch(self, flat: FlatParameters) -> Work:
        flat.take()
        if not flat.kept.is_floating_point() or flat.kept.itemsize == 1:
            return broadcast(flat.kept.view(torch.uint8), self._group, 0)  # bytes, which every backend takes
        return all_reduce(flat.kept.div_(self._group.size()), self._group)

    def finish(self) -> None:
        """Take over what was launched and has been waited for."""
        if self._group.size() > 1:
            for flat in self._flats:
                flat.put_back()


def _real(parameter: Tensor) -> Tensor:
    detached = parameter.detach()
    return torch.view_as_real(detached) if detached.is_complex() else detached


def _views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = flat.split([part.numel() for part in like])
    return [piece.view(part.shape) for piece, part in zip(pieces, like, strict=True)]
