"""A job that goes on with another number of ranks goes on with the same training: order, rates, gradients, momentum."""

import io

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from harness.models import generator
from harness.ranks import pool
from paceline import DistributedDataParallel, windows
from paceline.data import GlobalShuffle
from paceline_recipes import Curve, LargeMinibatch, parameter_groups

pytestmark = pytest.mark.processes

NUM_SAMPLES, NUM_EPOCHS = 66, 3


def data():
    x = torch.randn(NUM_SAMPLES, 6, generator=generator(1), dtype=torch.float64)
    return TensorDataset(x, x.prod(dim=1, keepdim=True))


def train_and_stop(rank, _num_ranks, local, accumulation, checkpoint, stop_at):
    """Train to step `stop_at`, from a checkpoint if there is one; returns a checkpoint, or the last weights."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double())
    optimizer = torch.optim.SGD(parameter_groups(model, 1e-2), lr=0.05, momentum=0.9)
    curve = Curve(total=NUM_EPOCHS, warmup=1, decay="cosine")
    recipe = LargeMinibatch(
        optimizer, 4, local[rank], curve, accumulation=accumulation, epoch_samples=NUM_SAMPLES
    )
    shuffle = GlobalShuffle(NUM_SAMPLES, recipe.batch)
    loader = DataLoader(data(), batch_sampler=shuffle)
    if checkpoint is not None:
        saved = torch.load(io.BytesIO(checkpoint), weights_only=True)
        for part, state in zip((model, optimizer, recipe, shuffle), saved, strict=True):
            part.load_state_dict(state)
    seen = []
    while recipe.time < NUM_EPOCHS:
        for batches in windows(loader, accumulation):
            with model.accumulate(batches, weight=lambda batch: len(batch[0])) as micro_batches:
                for x, y in micro_batches:
                    (model(x) - y).square().mean().backward()
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.zero_grad()
            recipe.step(samples=round(micro_batches.total_weight))
            if recipe.last_epoch == stop_at:
                file = io.BytesIO()
                torch.save([part.state_dict() for part in (model, optimizer, recipe, shuffle)], file)
                return file.getvalue(), seen
    return torch.cat([p.detach().flatten() for p in model.parameters()]), seen


@pytest.mark.parametrize(
    ("local", "accumulation"),
    [((4, 4, 4), 1), ((7, 5), 1), ((2, 1), 4)],
    ids=["3 ranks", "unequal", "micro-steps"],
)
def test_the_same_training_goes_on(local, accumulation):
    """12 samples a step on 2 ranks, from the second epoch's middle on others: as if nothing had happened, to 1e-12."""
    (whole, rates), _ = pool(2).run(train_and_stop, (6, 6), 1, None, -1)
    (checkpoint, first), _ = pool(2).run(train_and_stop, (6, 6), 1, None, 8)
    found = pool(len(local)).run(train_and_stop, local, accumulation, checkpoint, -1)
    assert first + found[0][1] == rates
    assert len(rates) == 18
    for weights, _ in found:
        assert torch.equal(weights, found[0][0])
        assert (weights - whole).abs().max() < 1e-12
