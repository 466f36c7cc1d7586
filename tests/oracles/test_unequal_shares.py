"""Unequal shares: gradients of one process on the whole batch, whatever each rank trains, and whoever moves samples.

The data are rows whose loss depends on the sample, so a sample that counts twice, not at all or with another weight
gives another gradient.
"""

import torch
from torch.utils.data import DataLoader, TensorDataset

from models import Mlp, digest
from paceline import DistributedDataParallel
from paceline.data import GlobalBatch, GlobalShuffle
from ranks import pool

NUM_SAMPLES = 90  # 6 steps of 15


def dataset():
    source = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_SAMPLES, 8, generator=source, dtype=torch.float64)
    return TensorDataset(x, torch.arange(NUM_SAMPLES))


def mean_loss(output, index):
    return (output.square().sum(1) * (1 + index)).mean()


def gradient_of(model, rows):
    """One process, on these samples."""
    model.zero_grad()
    x, index = dataset()[rows]
    mean_loss(model(x), index).backward()
    return [p.grad.clone() for p in model.parameters()]


def difference(model, wanted):
    """The largest, relative to the gradient's norm."""
    pairs = zip(model.parameters(), wanted, strict=True)
    return max(((p.grad - g).norm() / g.norm()).item() for p, g in pairs)


def make(seed=0):
    torch.manual_seed(seed)
    return Mlp().double()


SHARES = [(8, 4, 2, 1), (5, 4, 3, 3), (0, 7, 0, 8), (15, 0, 0, 0), (1, 1, 1, 12), (8, 4, 2, 1)]


def shares_every_step(rank, _num_ranks):
    """Each step has other shares, by windows; returns the worst difference, and how ranks' samples add up."""
    shuffle = GlobalShuffle(NUM_SAMPLES, GlobalBatch(SHARES[0]))
    model = DistributedDataParallel(make(), batch_sampler=shuffle)
    alone, order = make(), shuffle.order(0).tolist()
    loader = DataLoader(dataset(), batch_sampler=shuffle)
    worst, seen = 0.0, []
    for place, batches in enumerate(shuffle.steps(loader)):
        assert shuffle.step.samples == SHARES[place]
        model.zero_grad()
        with model.accumulate(batches) as micro_batches:
            for x, index in micro_batches:
                seen += index.tolist()
                mean_loss(model(x), index).backward()
        worst = max(worst, difference(model, gradient_of(alone, order[15 * place : 15 * (place + 1)])))
        if place + 1 < len(SHARES):
            shuffle.change(GlobalBatch(SHARES[place + 1]))
    return worst, seen, digest(p.grad for p in model.parameters())


def test_shares_that_change_every_step():
    """8/4/2/1, nothing for some, everything for one: exact to 1e-12, and every sample once."""
    outcomes = pool(4).run(shares_every_step)
    assert max(worst for worst, _, _ in outcomes) < 1e-12
    assert sorted(sample for _, seen, _ in outcomes for sample in seen) == list(range(NUM_SAMPLES))
    assert len({gradients for _, _, gradients in outcomes}) == 1
