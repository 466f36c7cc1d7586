"""The library's reductions between ranks of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from paceline.observe import StepTiming
from paceline.process_group.in_process import InProcessWorld
from paceline.reductions import Message, Reduction
from paceline.reductions.lossy import Lossy

_NO_TIMING = StepTiming(0, 0.0, 0.0, 0.0, 0.0, ())


class Exchange:
    """Reduces lists of tensors, one list a rank, with the library's reductions.

    Args:
        named_parameters: Whose gradients, or values, they are.
        num_ranks: How many.
        make_reduction: Called for every rank.
    """

    def __init__(
        self,
        named_parameters: dict[str, nn.Parameter],
        num_ranks: int,
        make_reduction: Callable[[], Reduction],
    ) -> None:
        self._parameters = list(named_parameters.values())
        self._groups = InProcessWorld(num_ranks).groups
        self._reductions = [make_reduction() for _ in self._groups]
        for reduction, group in zip(self._reductions, self._groups, strict=True):
            reduction.prepare(named_parameters, group)

    @torch.no_grad()
    def reduce(self, of_ranks: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return what every rank gets: one tensor a parameter."""
        messages = [self._message(rank, tensors) for rank, tensors in enumerate(of_ranks)]
        pending = []
        for reduction, message in zip(self._reductions, messages, strict=True):
            reduction.begin_step()
            message.flat.mul_(reduction.input_scale(len(messages)))
            pending.append(reduction.launch(message))
        for each in pending:
            each.wait()
        for reduction in self._reductions:
            reduction.end_step(_NO_TIMING)
        return list(messages[0].gradients)

    def _message(self, rank: int, tensors: Sequence[Tensor]) -> Message:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        pieces = flat.split([tensor.numel() for tensor in tensors])
        views = [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
        return Message(0, True, flat, flat.numel(), views, self._parameters, self._groups[rank])

    def sent_bytes(self, tensors: Sequence[Tensor]) -> float:
        """By rank 0 in the last step, as its reduction counts them; `tensors` are what was reduced."""
        first = self._reductions[0]
        if isinstance(first, Lossy):
            return first.last_step.sent_bytes
        return ring_bytes(tensors, len(self._groups))


def ring_bytes(tensors: Sequence[Tensor], num_ranks: int) -> float:
    """What each rank sends when these are all-reduced with as few bytes as possible: 2 (P-1)/P of their size."""
    return 2 * (num_ranks - 1) / num_ranks * sum(tensor.nbytes for tensor in tensors)
