"""`compression=`: real ranks, real backwards, over Gloo."""

import copy

import pytest
import torch

from models import Mlp, digest, generator, squares
from paceline import DistributedDataParallel
from paceline.reductions.choice import COMPRESSIONS
from ranks import pool

ERRORS = {"fp16": 1e-3, "bf16": 8e-3, "int8": 2e-2}
"""Relative to the largest gradient, of one step."""


def distances(rank, _num_ranks, name):
    """How far each step's gradients are from the mean, and what they are."""
    torch.manual_seed(0)
    plain = Mlp(width=64)
    twin = DistributedDataParallel(copy.deepcopy(plain), bucket_cap_mb=0.01)
    model = DistributedDataParallel(plain, compression=name, bucket_cap_mb=0.01)
    seen = []
    for step in range(3):
        for each in (model, twin):
            each.zero_grad()
            squares(each(torch.randn(4, 8, generator=generator(rank, step)))).backward()
        pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
        largest = max(q.grad.abs().max().item() for _, q in pairs)
        error = max((p.grad - q.grad).abs().max().item() for p, q in pairs) / largest
        seen.append((error, digest([p.grad for p in model.parameters()])))
    return seen


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", sorted(ERRORS))
def test_near_the_mean_and_the_same_everywhere(name, num_ranks):
    """Each step within what the wire format loses, and bitwise equal on all ranks."""
    first, *others = pool(num_ranks).run(distances, name)
    assert all(seen == first for seen in others)
    assert 0 < max(error for error, _ in first) < ERRORS[name]


def test_no_name_is_forgotten():
    """Every name is tested above."""
    assert set(COMPRESSIONS) == set(ERRORS)
