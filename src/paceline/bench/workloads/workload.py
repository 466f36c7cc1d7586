"""What must a workload offer?"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn


class Workload(ABC):
    """A model, endless batches for it, and a loss. Implementations are frozen dataclasses of their sizes."""

    @classmethod
    @abstractmethod
    def quick(cls) -> "Workload":
        """Return the smallest size that still takes every path."""

    @abstractmethod
    def make_model(self) -> nn.Module:
        """Return a fresh model; its weights come from torch's current generator."""

    @abstractmethod
    def make_batch(self, rank: int, step: int) -> Any:
        """Return this rank's batch of this step; the same arguments give the same batch."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any, carry: Any) -> tuple[Tensor, Any]:
        """Return the loss and what the next step carries over (a recurrent state; None at first)."""

    def notes(self) -> tuple[str, ...]:
        """Return what a reader of the figures must know about the data."""
        return ()


def batch_generator(rank: int, step: int) -> torch.Generator:
    """Return the random numbers of one rank's batch at one step."""
    return torch.Generator().manual_seed(1_000_003 * rank + step + 1)
