"""Two extremes: a thousand tiny parameters (overhead is all there is), and few wide layers (communication is).

The chain of tiny parameters computes next to nothing, so what is left is overhead per parameter. The wide MLP has many
gradient bytes for each operation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline_lab.workloads.workload import SizedWorkload, batch_generator


class AddChain(nn.Module):
    """Add every parameter to the input, one after another: backward is one addition node per parameter."""

    def __init__(self, num_parameters: int, num_floats: int) -> None:
        super().__init__()
        self.terms = nn.ParameterList([torch.randn(num_floats) for _ in range(num_parameters)])
        self._terms = list(self.terms)  # ParameterList's own iteration would cost more than the additions

    def forward(self, total: Tensor) -> Tensor:
        """Return `total` (num_floats,) plus all parameters."""
        for term in self._terms:
            total = total + term
        return total


@dataclass(frozen=True)
class TinyWorkload(SizedWorkload):
    """1,000 parameters of 16 floats."""

    num_parameters: int = 1000
    num_floats: int = 16

    @classmethod
    def quick(cls) -> TinyWorkload:
        """Return 50 parameters."""
        return cls(num_parameters=50)

    def make_model(self) -> nn.Module:
        """Return the chain."""
        return AddChain(self.num_parameters, self.num_floats)

    def make_batch(self, rank: int, step: int) -> Tensor:
        """Return one vector (num_floats,)."""
        return torch.randn(self.num_floats, generator=batch_generator(rank, step))

    def loss(self, model: nn.Module, batch: Tensor, carry: None) -> tuple[Tensor, None]:
        """Return the mean square of the sum."""
        total: Tensor = model(batch)
        return (total * total).mean(), None


@dataclass(frozen=True)
class WideMlpWorkload(SizedWorkload):
    """`num_layers` square layers; 3 of 2048 are 50 MB of float32 gradients."""

    width: int = 2048
    num_layers: int = 3
    batch_size: int = 64

    @classmethod
    def quick(cls) -> WideMlpWorkload:
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
