"""How often the host waits for the device in a training step: never, but for what is named here."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from device import late
from device.cases import SIDES, made, vectors, wrapped
from device.marks import device
from device.ranks import on_device, ranks
from harness.models import Mlp, sgd, squares
from paceline.data import GlobalBatch, GlobalShuffle

pytestmark = device

STEADY = range(
    8, 12
)  # after the steps in which buckets are cut and pieces are ordered, and before the next of these
SAMPLES = 400


def _trained(here, model, optimizer, batches):
    """The host's waits within each step, by cause."""
    found = []
    for batch in batches:
        with late.counted() as causes:
            optimizer.zero_grad()
            squares(model(batch)).backward()
            optimizer.step()
        found.append(causes)
    return found


def steps_of(rank, _num_ranks, side, options, optimizer_name):
    """What each step of a model with these options waits for, on this rank."""
    import paceline_recipes
    from paceline import optim

    here = on_device(rank, SIDES[side])
    model = wrapped(made(Mlp, here), here, side, **options)
    kinds = {"LARS": paceline_recipes.LARS, "LAMB": paceline_recipes.LAMB}
    optimizer = kinds[optimizer_name](model.parameters(), lr=0.1) if optimizer_name in kinds else sgd(model)
    if optimizer_name == "shard":
        optimizer = optim.shard(optimizer, model)
    elif options.get("overlap_forward"):
        optimizer = optim.overlap(optimizer, model)
    batches = [vectors(here, step) for step in range(STEADY.stop)]
    with late.scheduled("latest"):
        return _trained(here, model, optimizer, batches)


def balanced_steps(rank, _num_ranks):
    """The same with shares that `balance` may move."""
    here = on_device(rank, SIDES["nccl"])
    sampler = GlobalShuffle(SAMPLES, GlobalBatch((6, 6)), rank=rank, seed=3)
    model = wrapped(made(Mlp, here), here, "nccl", batch_sampler=sampler, balance="auto")
    optimizer, found = sgd(model), []
    data = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1)).pin_memory()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_sampler=sampler)
    with late.scheduled("latest"):
        for ((batch,),) in sampler.steps(loader):
            moved = batch.pin_memory().to(here.device, non_blocking=True)
            found += _trained(here, model, optimizer, [moved])
            if len(found) == STEADY.stop:
                break
    return found


def waits(outcomes):
    """What steady steps wait for, on all ranks."""
    return sum((found[step] for found in outcomes for step in STEADY), Counter())


@pytest.mark.parametrize(
    ("options", "optimizer"),
    [
        ({}, ""),
        ({"find_unused_parameters": True}, ""),
        ({"weight": len}, ""),
        ({"skip_all_reduce_unused_params": True}, ""),
        ({"compression": "bf16"}, ""),
        ({"overlap_forward": "always"}, ""),
        ({}, "LARS"),
        ({}, "LAMB"),
        ({}, "shard"),
        ({"overlap_forward": "always"}, "shard"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*did not find any unused parameters")
def test_a_step_does_not_wait_for_the_device(options, optimizer):
    """The host runs ahead of the device: nothing that it does in a step needs a value from there."""
    assert waits(ranks().run(steps_of, "nccl", options, optimizer)) == {}


def test_a_step_with_balanced_shares_does_not_either():
    """How long ranks work is read when the device has come past it."""
    assert waits(ranks().run(balanced_steps)) == {}


@pytest.mark.parametrize("compression", ["int8", "topk", "powersgd"])
def test_a_codec_with_residuals_waits_beside_training(compression):
    """For one flag of the step before, on its own thread, before it compresses the next bucket."""
    found = waits(ranks().run(steps_of, "nccl", {"compression": compression}, ""))
    assert set(found) <= {"event.synchronize"}
    assert found["event.synchronize"] <= 2 * len(STEADY)


def test_our_backend_takes_tensors_through_the_host():
    """Once a bucket its thread waits for the copy to the host: what is to be sent has to be there."""
    found = waits(ranks().run(steps_of, "paceline", {}, ""))
    assert set(found) == {"event.synchronize"}
