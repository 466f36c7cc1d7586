"""One linear layer, trained over a process group and by one process on the whole batch."""

from __future__ import annotations

from typing import Any

import torch

from harness.models import digest, generator, squares
from paceline import DistributedDataParallel


def train_linear(
    rank: int, num_ranks: int, seed: int, shape: tuple[int, int], steps: int, **wrapping: Any
) -> tuple[float, str]:
    """Train; returns how far the last gradients are from one process's, and a digest of their bits.

    Args:
        rank: In the group.
        num_ranks: In the group.
        seed: Of the layer and the batches.
        shape: Of the layer.
        steps: How many.
        wrapping: Arguments of `DistributedDataParallel`.
    """
    torch.manual_seed(seed)
    model = DistributedDataParallel(torch.nn.Linear(*shape).double(), **wrapping)
    torch.manual_seed(seed)
    alone = torch.nn.Linear(*shape).double()
    for step in range(steps):
        model.zero_grad()
        alone.zero_grad()
        for r in range(num_ranks):
            x = torch.randn(4, shape[0], generator=generator(seed, step, r), dtype=torch.float64)
            if r == rank:
                squares(model(x)).backward()
            (squares(alone(x)) / num_ranks).backward()
    pairs = zip(model.module.parameters(), alone.parameters(), strict=True)
    error = max((_gradient(p) - _gradient(q)).abs().max().item() for p, q in pairs)
    return error, digest([_gradient(p) for p in model.parameters()])


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad
