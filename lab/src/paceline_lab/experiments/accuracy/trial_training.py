"""One training run of the large-batch study: a task, a row, a global batch, a rate and a seed in; accuracies out.

What becomes of the ranks' gradients in a step is a `Combination`: the library's reductions, each on ranks of one
process.
"""

from __future__ import annotations

import copy
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from paceline.reductions import Reduction, choose_reduction
from paceline_adasum import combine
from paceline_lab.doubles.in_process import InProcessWorld
from paceline_lab.experiments.accuracy.in_process_ranks import (
    RankReductions,
    backward_of_the_mean,
    gradients_of_each,
    loss_of,
    ring_bytes,
    slices,
)
from paceline_lab.experiments.accuracy.large_batch_rows import ROWS, Row, make_optimizer, rate_at, set_rate
from paceline_lab.experiments.accuracy.splits import Part, Samples
from paceline_lab.experiments.accuracy.store import Outcome, Trial
from paceline_lab.experiments.accuracy.tasks import TASKS
from paceline_recipes import DiLoCo, LocalSGD


def run_trial(trial: Trial, samples: Samples) -> Outcome:
    """Train and measure. A run whose loss is no longer finite ends there, and counts as it stands."""
    start_s = time.perf_counter()
    task, row = TASKS[trial.task], ROWS[trial.row]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(trial.seed)
        model = task.make_model()
    combination = make_combination(row, model, trial.factor)
    num_steps = trial.epochs * trial.num_train // (task.rank_batch * trial.factor)
    losses = []
    for step, batch in enumerate(batches(samples.train, task.rank_batch * trial.factor, trial)):
        rate = rate_at(row, trial.rate, trial.factor, step, num_steps)
        losses.append(combination.step(samples.train.inputs[batch], samples.train.labels[batch], rate))
        if not math.isfinite(losses[-1]):
            break
    combination.finish()
    tail = losses[-max(1, len(losses) // 10) :]
    loss = sum(tail) / len(tail)
    return Outcome(
        accuracy(model, samples.validation),
        accuracy(model, samples.test),
        loss if math.isfinite(loss) else None,
        combination.sent_bytes / len(losses),
        round(time.perf_counter() - start_s, 3),
    )


def batches(part: Part, size: int, trial: Trial) -> Iterator[Tensor]:
    """Yield each global batch's samples: one shuffle an epoch, the same for every row and batch of a seed."""
    for epoch in range(trial.epochs):
        source = torch.Generator().manual_seed(1_000_003 * trial.seed + epoch)
        order = torch.randperm(len(part), generator=source)
        yield from order[: len(order) // size * size].split(size)


@torch.no_grad()
def accuracy(model: nn.Module, part: Part) -> float:
    """Return which share of the samples the model puts into the right class."""
    model.eval()
    pairs = zip(part.inputs.split(1024), part.labels.split(1024), strict=True)
    num_right = sum(int((model(x).argmax(dim=1) == y).sum()) for x, y in pairs)
    model.train()
    return num_right / len(part)


class Combination(ABC):
    """Trains a model on global batches.

    Args:
        model: Model in training mode.
        num_ranks: Number of ranks; divides every global batch.
        optimizer: Name of one.

    Attributes:
        sent_bytes: Bytes of gradients or parameters that a rank has sent so far.
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
        """Bring what the ranks hold into the model after the last step."""


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
        self.reductions = RankReductions(dict(model.named_parameters()), num_ranks, make_reduction)

    def step(self, inputs: Tensor, labels: Tensor, rate: float) -> float:
        loss, gradients = gradients_of_each(self.model, inputs, labels, self.num_ranks)
        for parameter, gradient in zip(self.parameters, self.reductions.reduce(gradients), strict=True):
            parameter.grad = gradient
        set_rate(self.optimizer, rate)
        self.optimizer.step()
        self.sent_bytes += self.reductions.sent_bytes(self.parameters)
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

    def backward(self, inputs: Tensor, labels: Tensor, rate: float) -> float:
        """Leave every rank's own gradients in its copy, and the rate in its optimizer; returns the batch's loss."""
        total = 0.0
        batches = slices(inputs, labels, self.num_ranks)
        for model, optimizer, (x, y) in zip(self.copies, self.optimizers, batches, strict=True):
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model, x, y)
            loss.backward()
            set_rate(optimizer, rate)
            total += loss.item() / self.num_ranks
        return total

    def finish(self) -> None:
        self.model.load_state_dict(self.copies[0].state_dict())


class AdasumOfUpdates(Copies):
    """Each rank's optimizer takes its step; what the steps changed is combined by Adasum (the delta form)."""

    def step(self, inputs: Tensor, labels: Tensor, rate: float) -> float:
        loss = self.backward(inputs, labels, rate)
        for optimizer in self.optimizers:
            optimizer.step()
        with torch.no_grad():
            updates = [self._updates(each) for each in self.copies]
            for start, update in zip(self.parameters, combine(updates), strict=True):
                start.add_(update)
            for each in self.copies:
                for parameter, start in zip(each.parameters(), self.parameters, strict=True):
                    parameter.copy_(start)
        self.sent_bytes += ring_bytes(self.parameters, self.num_ranks)
        return loss

    def _updates(self, moved: nn.Module) -> list[Tensor]:
        return [end - start for end, start in zip(moved.parameters(), self.parameters, strict=True)]


class RareAverages(Copies):
    """Every rank trains by itself; the library's LocalSGD or DiLoCo brings the parameters together now and then.

    Their steps wait for all ranks, so each rank's is taken on a thread of its own.
    """

    def __init__(
        self, model: nn.Module, num_ranks: int, wrap: Callable[[Optimizer, ProcessGroup], LocalSGD]
    ) -> None:
        super().__init__(model, num_ranks)
        self._threads = ThreadPoolExecutor(num_ranks)
        self._wrapped = list(self._threads.map(wrap, self.optimizers, InProcessWorld(num_ranks).groups))

    def step(self, inputs: Tensor, labels: Tensor, rate: float) -> float:
        loss = self.backward(inputs, labels, rate)
        self._on_all_ranks(LocalSGD.step)
        return loss

    def finish(self) -> None:
        self._on_all_ranks(LocalSGD.synchronize)
        self._threads.shutdown()
        super().finish()

    def _on_all_ranks(self, method: Callable[[LocalSGD], Any]) -> None:
        list(self._threads.map(method, self._wrapped))
        self.sent_bytes = self._wrapped[0].traffic.sent_bytes


def make_combination(row: Row, model: nn.Module, num_ranks: int) -> Combination:
    """Return the combination of the ranks' gradients for a row."""
    if row.combination == "mean":
        return MeanOfRanks(model, num_ranks, row.optimizer)
    if row.combination == "adasum":
        return AdasumOfUpdates(model, num_ranks)
    if row.combination == "adasum of gradients":
        return AdasumOfGradients(model, num_ranks)
    if row.combination == "local":
        return RareAverages(model, num_ranks, lambda own, group: LocalSGD(own, row.local_steps, group))
    if row.combination == "diloco":
        return RareAverages(
            model, num_ranks, lambda own, group: DiLoCo(own, row.local_steps, process_group=group)
        )
    codec = None if row.combination == "none" else row.combination
    return Reduced(model, num_ranks, lambda: choose_reduction(None, codec))
