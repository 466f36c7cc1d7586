"""Trains a model that knows its sampler on samples with different losses, and compares with one process.

A sample that counts twice, not at all or with a wrong weight gives another gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from harness.models import Mlp
from paceline import DistributedDataParallel
from paceline.data import GlobalBatch, GlobalShuffle

NUM_SAMPLES = 90  # 6 steps of 15


def dataset(num_samples: int = NUM_SAMPLES) -> TensorDataset:
    source = torch.Generator().manual_seed(0)
    x = torch.randn(num_samples, 8, generator=source, dtype=torch.float64)
    return TensorDataset(x, torch.arange(num_samples))


def mean_loss(output: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return (output.square().sum(1) * (1 + index)).mean()


def make() -> torch.nn.Module:
    torch.manual_seed(0)
    return Mlp().double()


def gradient_of(rows: Any) -> list[Any]:
    """Return the gradient of one process on these samples."""
    model = make()
    x, index = dataset()[rows]
    mean_loss(model(x), index).backward()
    return [p.grad for p in model.parameters()]


def difference(model: torch.nn.Module, rows: Any) -> float:
    """Return the largest difference of any parameter, relative to the gradient's norm."""
    pairs = zip(model.parameters(), gradient_of(rows), strict=True)
    return max(float((p.grad - g).norm() / g.norm()) for p, g in pairs)


def make_pair(
    shares: tuple[int, ...], accumulation: int = 1, workers: int = 0, **kwargs: Any
) -> tuple[DistributedDataParallel, GlobalShuffle, DataLoader[Any]]:
    """Return a model that knows its sampler, and the loader."""
    shuffle = GlobalShuffle(NUM_SAMPLES, GlobalBatch(shares, accumulation))
    loader = DataLoader(dataset(), batch_sampler=shuffle, num_workers=workers)
    return DistributedDataParallel(make(), batch_sampler=shuffle, **kwargs), shuffle, loader


def train_window(model: DistributedDataParallel, batches: Sequence[Any], **kwargs: Any) -> Any:
    model.zero_grad()
    with model.accumulate(batches, **kwargs) as micro_batches:
        for x, index in micro_batches:
            mean_loss(model(x), index).backward()
    return micro_batches
