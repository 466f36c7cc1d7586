"""Ranks in one process, one after another, so a study may have many ranks on a few cores.

Rules
1. Rank r computes on its slice of the global batch, by itself, exactly what a process would. The kernels and shapes
   are the same, so batch normalisation takes each rank's own statistics. Two such ranks are bitwise two processes.
2. The ranks' gradients are combined by the library's code, not by a copy of it.
3. Running statistics are rank 0's, since DistributedDataParallel broadcasts rank 0's buffers.

Computing all ranks' slices at once (`torch.func.vmap`, or normalisation by groups) would gain nothing. An epoch costs
as much in slices of 64 as in whole batches on the recorded machine, since a slice stays in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.observe import StepTiming
from paceline.reductions import Message, Reduction, StepEnd
from paceline.reductions.lossy import Lossy
from paceline_lab.doubles.in_process import InProcessWorld


def loss_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of a batch."""
    return functional.cross_entropy(model(inputs), labels)


def backward_of_the_mean(model: nn.Module, inputs: Tensor, labels: Tensor, num_ranks: int) -> float:
    """Leave the mean of all ranks' gradients in `.grad`; returns the global batch's loss.

    Args:
        model: Model in training mode; its gradients are replaced.
        inputs: The global batch, shape (num_ranks * n, ...); rank r has the r-th n of them.
        labels: Shape (num_ranks * n,).
        num_ranks: Divides the batch.
    """
    model.zero_grad(set_to_none=True)
    if not has_batch_statistics(model):
        # Equal slices: the mean of the slices' means is the batch's, up to rounding; it spares P - 1 passes.
        loss = loss_of(model, inputs, labels)
        loss.backward()
        return loss.item()
    weight = 1.0 / num_ranks
    total = 0.0
    for rank, (x, y) in enumerate(slices(inputs, labels, num_ranks)):
        with statistics_of(model, rank):
            loss = loss_of(model, x, y)
        (weight * loss).backward()
        total += weight * loss.item()
    return total


def gradients_of_each(
    model: nn.Module, inputs: Tensor, labels: Tensor, num_ranks: int
) -> tuple[float, list[list[Tensor]]]:
    """Return the global batch's loss and every rank's gradients: [rank][parameter]. Arguments as above."""
    parameters = list(model.parameters())
    total, gradients = 0.0, []
    for rank, (x, y) in enumerate(slices(inputs, labels, num_ranks)):
        with statistics_of(model, rank):
            loss = loss_of(model, x, y)
        gradients.append(list(torch.autograd.grad(loss, parameters)))
        total += loss.item() / num_ranks
    return total, gradients


def slices(inputs: Tensor, labels: Tensor, num_ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each rank's part of a global batch."""
    n = len(labels) // num_ranks
    assert n * num_ranks == len(labels)
    yield from zip(inputs.split(n), labels.split(n), strict=True)


def has_batch_statistics(model: nn.Module) -> bool:
    """Return whether a sample's output depends on the other samples of its batch."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


@contextmanager
def statistics_of(model: nn.Module, rank: int) -> Iterator[None]:
    """Let only rank 0 move the running statistics."""
    frozen: Sequence[_BatchNorm] = (
        [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats] if rank else ()
    )
    for module in frozen:
        module.track_running_stats = False
    try:
        yield
    finally:
        for module in frozen:
            module.track_running_stats = True


_NO_TIMING = StepTiming(0, 0.0, 0.0, 0.0, 0.0, ())


class RankReductions:
    """Reduces lists of tensors, one list a rank, with the library's reductions.

    Args:
        named_parameters: Parameters whose gradients, or values, are reduced.
        num_ranks: Number of ranks.
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
        """Return the result of every rank: one tensor per parameter."""
        messages = [self._message(rank, tensors) for rank, tensors in enumerate(of_ranks)]
        pending = []
        for reduction, message in zip(self._reductions, messages, strict=True):
            message.flat.mul_(reduction.begin_step(len(messages)))
            pending.append(reduction.launch(message))
        for each in pending:
            each.wait()
        for reduction in self._reductions:
            reduction.end_step(StepEnd(_NO_TIMING))
        return list(messages[0].gradients)

    def _message(self, rank: int, tensors: Sequence[Tensor]) -> Message:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        pieces = flat.split([tensor.numel() for tensor in tensors])
        views = [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
        return Message(0, True, flat, flat.numel(), views, self._parameters, self._groups[rank])

    def sent_bytes(self, tensors: Sequence[Tensor]) -> float:
        """Return what rank 0 sent in the last step, by its reduction's count; `tensors` are what was reduced."""
        first = self._reductions[0]
        if isinstance(first, Lossy):
            return first.last_step.sent_bytes
        return ring_bytes(tensors, len(self._groups))


def ring_bytes(tensors: Sequence[Tensor], num_ranks: int) -> float:
    """Return what each rank sends when these are all-reduced with as few bytes as possible: 2 (P-1)/P of their size."""
    return 2 * (num_ranks - 1) / num_ranks * sum(tensor.nbytes for tensor in tensors)
