"""Three and four ranks equal one process that sees the whole batch, in float64."""

import pytest
import torch
from torch import nn

from harness.models import Mlp, OddShapes, TiedLanguageModel, generator, squares, train
from harness.ranks import pool
from paceline import DistributedDataParallel

pytestmark = pytest.mark.processes

BUILDERS = {
    "mlp": Mlp,
    "tied": TiedLanguageModel,
    "odd_shapes": OddShapes,
    "group_norm": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 9, 3)
    ),
}


def inputs(name, seed, step, rank):
    source = generator(seed, step, rank)
    if name == "tied":
        return torch.randint(0, 13, (4, 5), generator=source)
    shape = (4, 3, 5, 5) if name == "group_norm" else (4, 8)
    return torch.randn(shape, generator=source, dtype=torch.float64)


def largest_difference(rank, num_ranks, name, seed, options):
    """Between this rank's trained parameters and those of one process on the concatenated batches."""
    torch.manual_seed(seed)
    alone = BUILDERS[name]().double()
    torch.manual_seed(seed + rank)
    model = DistributedDataParallel(BUILDERS[name]().double(), **options)
    steps = range(20)
    train(model, (inputs(name, seed, step, rank) for step in steps))
    train(alone, (torch.cat([inputs(name, seed, step, r) for r in range(num_ranks)]) for step in steps))
    pairs = zip(model.module.parameters(), alone.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs if a.numel())


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_ranks_equal_one_process(name, num_ranks):
    """After 20 SGD steps with momentum the parameters agree to 1e-12."""
    assert max(pool(num_ranks).run(largest_difference, name, 3, {})) < 1e-12


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_cap_mb": 0.0005},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
    ],
    ids="+".join,
)
def test_options_equal_one_process(options):
    """Options change how, not what."""
    assert max(pool(3).run(largest_difference, "mlp", 4, options)) < 1e-12


def unequal_shares_differ(rank, num_ranks, seed):
    torch.manual_seed(seed)
    model = DistributedDataParallel(nn.Linear(8, 2).double())
    batches = [
        torch.randn(1 + 4 * r, 8, generator=generator(seed, r), dtype=torch.float64) for r in range(num_ranks)
    ]
    squares(model(batches[rank])).backward()
    torch.manual_seed(seed)
    alone = nn.Linear(8, 2).double()
    squares(alone(torch.cat(batches))).backward()
    return (alone.weight.grad - model.module.weight.grad).abs().max().item()


def test_the_mean_is_over_ranks_not_samples():
    """The negative control: with unequal shares the plain mean differs from one process visibly."""
    assert min(pool(3).run(unequal_shares_differ, 5)) > 1e-3
