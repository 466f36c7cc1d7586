"""What becomes of the ranks' gradients in a step: the library's reductions, each on ranks of one process."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from paceline.reductions import Mean, Reduction, choose_reduction
from paceline.reductions.adasum import combine
from paceline.study.exchange import Exchange, ring_bytes
from paceline.study.optimizers import make_optimizer, set_rate
from paceline.study.ranks import backward_of_the_mean, gradients_of_each, loss_of, slices
from paceline.study.rows import Row


class Combination(ABC):
    """Trains a model on global batches.

    Args:
        model: In training mode.
        num_ranks: How many; divides every global batch.
        optimizer: Name of one.

    Attributes:
        sent_bytes: What a rank has sent so far, of gradients or parameters.
    """

    def __init__(self, model: nn.Module, num_ranks: int, optimizer: str = "sgd") -> None:
        self.model, self.num_ranks = model, num_ranks
        self.optimizer = make_optimizer(optimizer, model)
        self.parameters = list(model.parameters())
        self.sent_bytes = 0.0

    @abstractmethod
    def step(self, inputs: Tensor, labels: Tensor, rate: float) -> float:
        """Take one step with a global batch; returns its loss. Mutates the model, or a rank's copy of it."""

    def finish(self) -> None:  # noqa: B027  most have nothing to do
        """After the last step: bring what the ranks hold into the model."""


class MeanOfRanks(Combination):
    """The mean of the ranks' gradients."""

    def step(self, inputs: Tensor, labels: Tensor, rate: float) -> float:
        loss = backward_of_the_mean(self.model, inputs, labels, self.num_ranks)
        set_rate(self.optimizer, rate)
        self.optimizer.step()
        self.sent_bytes += ring_bytes(self.parameters, self.num_ranks)
        return loss


class Reduced(Combination):
    """A reduction object for every rank, with its own state, over a group in this process."""

    def __init__(self, model: nn.Module, num_ranks: int, make_reduction: Callable[[], Reduction]) -> None:
        super().__init__(model, num_ranks)
        self.exchange = Exchange(dict(model.named_parameters()), num_ranks, make_reduction)

    def step(self, inputs: Tensor, labels: Tensor, rate: float) -> float:
        loss, gradients = gradients_of_each(self.model, inputs, labels, self.num_ranks)
        for parameter, gradient in zip(self.parameters, self.exchange.reduce(gradients), strict=True):
            parameter.grad = gradient
        set_rate(self.optimizer, rate)
        self.optimizer.step()
        self.sent_bytes += self.exchange.sent_bytes(self.parameters)
        return loss


class AdasumOfGradients(Combination):
    """The ranks' gradients combined by Adasum, then one optimizer."""

    def step(self, inputs: Tensor, labels: Tensor, rate: float) -> float:
        loss, gradients = gradients_of_each(self.model, inputs, labels, self.num_ranks)
        for parameter, gradient in zip(self.parameters, combine(gradients), strict=True):
            parameter.grad = gradient
        set_rate(self.optimizer, rate)
        self.optimizer.step()
        self.sent_bytes += ring_bytes(self.parameters, self.num_ranks)
        return loss


class Copies(Combination):
    """Every rank has a copy of the model and an optimizer of its own."""

    def __init__(self, model: nn.Module, num_ranks: int) -> None:
        super().__init__(model, num_ranks)
        self.copies = [copy.deepcopy(model) for _ in range(num_ranks)]
        self.optimizers = [make_optimizer("sgd", each) for each in self.copies]

    def step_alone(self, inputs: Tensor, labels: Tensor, rate: float) -> float:
        """Let every rank take a step by itself on its part of the batch; returns the batch's loss."""
        total = 0.0
        batches = slices(inputs, labels, self.num_ranks)
        for model, optimizer, (x, y) in zip(self.copies, self.optimizers, batches, strict=True):
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model, x, y)
            loss.backward()
            set_rate(optimizer, rate)
            optimizer.step()
            total += loss.item() / self.num_ranks
        return total

    @torch.no_grad()
    def hand_out(self, values: Sequence[Tensor]) -> None:
        """Give every rank these parameters."""
        for each in self.copies:
            for parameter, value in zip(each.parameters(), values, strict=True):
                parameter.copy_(value)
        self.sent_bytes += ring_bytes(self.parameters, self.num_ranks)

    def finish(self) -> None:
        self.model.load_state_dict(self.copies[0].state_dict())


class AdasumOfUpdates(Copies):
    """Each rank's optimizer takes its step; what the steps changed is combined by Adasum (the delta form)."""

    def step(self, inputs: Tensor, labels: Tensor, rate: float) -> float:
        loss = self.step_alone(inputs, labels, rate)
        with torch.no_grad():
            updates = [self._updates(each) for each in self.copies]
            for start, update in zip(self.parameters, combine(updates), strict=True):
                start.add_(update)
        self.hand_out(self.parameters)
        return loss

    def _updates(self, moved: nn.Module) -> list[Tensor]:
        return [end - start for end, start in zip(moved.parameters(), self.parameters, strict=True)]


class LocalSteps(Copies):
    """Every rank trains by itself, and the parameters are averaged every few steps; momentum stays with the rank."""

    def __init__(self, model: nn.Module, num_ranks: int, local_steps: int) -> None:
        super().__init__(model, num_ranks)
        self.local_steps, self.num_steps = local_steps, 0
        self.exchange = Exchange(dict(model.named_parameters()), num_ranks, Mean)

    def step(self, inputs: Tensor, labels: Tensor, rate: float) -> float:
        loss = self.step_alone(inputs, labels, rate)
        self.num_steps += 1
        if self.num_steps % self.local_steps == 0:
            self._average()
        return loss

    def finish(self) -> None:
        if self.num_steps % self.local_steps:
            self._average()
        super().finish()

    def _average(self) -> None:
        self.hand_out(self.exchange.reduce([list(each.parameters()) for each in self.copies]))


def make_combination(row: Row, model: nn.Module, num_ranks: int) -> Combination:
    """What a row does with its ranks."""
    if row.combination == "mean":
        return MeanOfRanks(model, num_ranks, row.optimizer)
    if row.combination == "adasum":
        return AdasumOfUpdates(model, num_ranks)
    if row.combination == "adasum of gradients":
        return AdasumOfGradients(model, num_ranks)
    if row.combination == "local":
        return LocalSteps(model, num_ranks, row.local_steps)
    codec = None if row.combination == "none" else row.combination
    return Reduced(model, num_ranks, lambda: choose_reduction(None, codec))
