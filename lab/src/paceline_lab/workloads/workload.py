"""A workload: a model, endless batches for it, and a loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Workload(ABC):
    """A model, endless batches for it, and a loss. Implementations are frozen dataclasses."""

    @abstractmethod
    def make_model(self) -> nn.Module:
        """Return a fresh model; its weights come from torch's current generator."""

    @abstractmethod
    def make_batch(self, rank: int, step: int) -> Any:
        """Return this rank's batch of this step; the same arguments give the same batch."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any, carry: Any) -> tuple[Tensor, Any]:
        """Return the loss and what the next step carries over (a recurrent state; None at first)."""

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer of the parameters."""
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)

    def answer(self, model: nn.Module) -> list[Tensor]:
        """Return what must be the same on all ranks after a step: the trained parameters."""
        return [parameter.detach() for parameter in model.parameters()]

    def notes(self) -> tuple[str, ...]:
        """Return remarks on the data that a reader of the figures needs."""
        return ()


class SizedWorkload(Workload):
    """A workload whose model comes in several sizes, and whose operations can be counted."""

    @classmethod
    @abstractmethod
    def quick(cls) -> SizedWorkload:
        """Return the smallest size that still takes every path."""

    def published(self) -> SizedWorkload:
        """Return the size at which others have published timings; only its operations are counted."""
        return self

    def operations(self) -> Mapping[str, float] | None:
        """Return floating-point operations of one forward, by module; None: they are counted."""
        return None


def batch_generator(rank: int, step: int) -> torch.Generator:
    """Return the random numbers of one rank's batch at one step."""
    return torch.Generator().manual_seed(1_000_003 * rank + step + 1)
