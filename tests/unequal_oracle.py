"""Training whose samples all have another loss, by a model that knows its sampler, and one process beside it.

One that counts twice, not at all or with another weight gives another gradient.
"""

import torch
from torch.utils.data import DataLoader, TensorDataset

from models import Mlp
from paceline import DistributedDataParallel
from paceline.data import GlobalBatch, GlobalShuffle

NUM_SAMPLES = 90  # 6 steps of 15


def dataset(num_samples=NUM_SAMPLES):
    source = torch.Generator().manual_seed(0)
    x = torch.randn(num_samples, 8, generator=source, dtype=torch.float64)
    return TensorDataset(x, torch.arange(num_samples))


def mean_loss(output, index):
    return (output.square().sum(1) * (1 + index)).mean()


def make():
    torch.manual_seed(0)
    return Mlp().double()


def gradient_of(rows):
    """One process, on these samples."""
    model = make()
    x, index = dataset()[rows]
    mean_loss(model(x), index).backward()
    return [p.grad for p in model.parameters()]


def difference(model, rows):
    """The largest of any parameter, relative to the gradient's norm."""
    pairs = zip(model.parameters(), gradient_of(rows), strict=True)
    return max(((p.grad - g).norm() / g.norm()).item() for p, g in pairs)


def make_pair(shares, accumulation=1, workers=0, **kwargs):
    """A model that knows its sampler, and the loader."""
    shuffle = GlobalShuffle(NUM_SAMPLES, GlobalBatch(shares, accumulation))
    loader = DataLoader(dataset(), batch_sampler=shuffle, num_workers=workers)
    return DistributedDataParallel(make(), batch_sampler=shuffle, **kwargs), shuffle, loader


def train_window(model, batches, **kwargs):
    model.zero_grad()
    with model.accumulate(batches, **kwargs) as micro_batches:
        for x, index in micro_batches:
            mean_loss(model(x), index).backward()
    return micro_batches
