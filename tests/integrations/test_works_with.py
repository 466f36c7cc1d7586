"""What docs/guide/works-with.md says and no other test does."""

import contextlib
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from harness.models import Mlp, digest, generator, random_batch, squares, train
from harness.ranks import pool
from harness.terminal import REPOSITORY
from paceline import DistributedDataParallel


def train_shards(rank, group, shards):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch's own deprecations

    torch.manual_seed(4)
    model = DistributedDataParallel(Mlp(16), process_group=group)
    options = {"lr": 0.01, "weight_decay": 0.1}
    if shards:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, process_group=group, **options
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **options)
    train(model, (random_batch(1, step, rank, shape=(6, 8)) for step in range(4)), optimizer)
    return digest(list(model.parameters()))


def digests(rank, num_ranks):
    groups = (dist.group.WORLD, dist.new_group(backend="paceline"))
    return [train_shards(rank, group, shards) for group in groups for shards in (False, True)]


@pytest.mark.processes
def test_zero_redundancy_optimizer():
    """Each rank keeps half of AdamW's state; parameters are those of the whole optimizer, over Gloo and our backend."""
    first, second = pool(2).run(digests)
    assert len({*first, *second}) == 1


def features(rank, _num_ranks):
    """Digests of the parameters after training with each feature, over Gloo and over our backend."""
    groups = (dist.group.WORLD, dist.new_group(backend="paceline"))
    return {feature: [train_with(feature, group, rank) for group in groups] for feature in FEATURES}


FEATURES = ("autocast", "hook", "join", "compile")


def train_with(feature, group, rank):
    torch.manual_seed(4)
    model = DistributedDataParallel(Mlp(16), process_group=group)
    if feature == "hook":
        model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    run = torch.compile(model, backend="eager") if feature == "compile" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    joins = feature == "join"
    with model.join() if joins else contextlib.nullcontext():
        for step in range(3 + joins * rank):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=feature == "autocast"):
                loss = squares(run(torch.randn(6, 8, generator=generator(2, step, rank))))
            loss.backward()
            optimizer.step()
    return digest(list(model.parameters()))


@pytest.mark.processes
def test_over_our_backend_as_over_gloo():
    """Autocast, torch's fp16 hook, uneven inputs, a compiled model: the same parameters, on both ranks."""
    first, second = pool(2).run(features)
    for feature in FEATURES:
        assert len({*first[feature], *second[feature]}) == 1, feature
    assert len({first[feature][0] for feature in FEATURES}) == len(
        FEATURES
    )  # each has trained in its own way


def test_every_row_of_the_table_names_a_test_or_says_that_there_is_none():
    page = (REPOSITORY / "docs" / "guide" / "works-with.md").read_text()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 15
    for what, with_ours, _ in rows:
        is_said = "not tested" in with_ours or "instead of it" in with_ours
        assert is_said or re.search(r"\]\(\.\./\.\./tests/[\w/]+\.py\)", with_ours), what
