"""A thousand tiny parameters: nothing to compute, so what is left is overhead per parameter."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.lab.bench.workloads.workload import SizedWorkload, batch_generator


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
    def quick(cls) -> "TinyWorkload":
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
