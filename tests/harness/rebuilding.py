"""A small training that goes on over other ranks: its model, its batches, its bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from harness.models import Mlp, digest, random_batch, squares, train
from paceline.errors import ConfigurationError

NUM_SAMPLES = 60


def mlp(seed: int = 1) -> nn.Module:
    """Return an MLP in float64 with the parameters of this seed."""
    torch.manual_seed(seed)
    return Mlp(dtype=torch.float64)


batch = partial(random_batch, 3, dtype=torch.float64)  # of a step and a rank


def train_steps(model: nn.Module, rank: int, steps: Iterable[int]) -> list[str]:
    """Train some steps on this rank's batches. Return the bits of each step's gradients."""
    return train(model, (batch(step, rank) for step in steps))


def bits_of(model: nn.Module) -> str:
    """Return a hash of the model's parameters."""
    return digest([p.detach() for p in model.parameters()])


def refused(call: Callable[[], object], errors: type[Exception] = ConfigurationError) -> str:
    """Return the message of the error that a call raises."""
    try:
        call()
    except errors as error:
        return str(error)
    return "not refused"


def samples() -> Tensor:
    """Return the data set."""
    source = torch.Generator().manual_seed(5)
    return torch.randn(NUM_SAMPLES, 8, generator=source, dtype=torch.float64)


def train_some(
    model: Any,
    shuffle: Any,
    optimizer: Optimizer,
    num_steps: int = NUM_SAMPLES,
    during: Callable[[], object] | None = None,
) -> list[int]:
    """Train steps of an epoch, and call a function after the third. Return the samples that this rank trained."""
    x, seen = samples(), []
    rows_of: Any = range(NUM_SAMPLES)
    loader: Any = DataLoader(rows_of, batch_sampler=shuffle, collate_fn=list)
    for step, batches in enumerate(shuffle.steps(loader)):
        with model.accumulate(batches) as micro_batches:
            for rows in micro_batches:
                squares(model(x[rows])).backward()
                seen += rows
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == num_steps:
            break
        if during is not None and step == 2:
            during()
    return seen
