"""Few wide layers on a small batch: many gradient bytes per operation, so communication weighs most."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.lab.bench.workloads.workload import SizedWorkload, batch_generator


@dataclass(frozen=True)
class WideMlpWorkload(SizedWorkload):
    """`num_layers` square layers; 3 of 2048 are 50 MB of float32 gradients."""

    width: int = 2048
    num_layers: int = 3
    batch_size: int = 64

    @classmethod
    def quick(cls) -> "WideMlpWorkload":
        """Return narrow layers."""
        return cls(width=64, num_layers=2, batch_size=2)

    def make_model(self) -> nn.Module:
        """Return Linear, ReLU, Linear, ..."""
        layers: list[nn.Module] = []
        for _ in range(self.num_layers):
            layers += [nn.Linear(self.width, self.width), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def make_batch(self, rank: int, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, each (batch_size, width)."""
        generator = batch_generator(rank, step)
        shape = (self.batch_size, self.width)
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], carry: None) -> tuple[Tensor, None]:
        """Return the mean squared error."""
        return functional.mse_loss(model(batch[0]), batch[1]), None
