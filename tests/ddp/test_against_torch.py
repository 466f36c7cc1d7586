"""Two ranks train with ours and with torch's: the same bits, after every step."""

import contextlib

import pytest
import torch
from torch import nn

from harness.models import WORKLOADS, IgnoresSome, Mlp, digest, generator, sgd, squares
from harness.ranks import pool
from paceline import DistributedDataParallel

pytestmark = pytest.mark.processes

NUM_STEPS = 20
SIDES = {"ours": DistributedDataParallel, "torch": nn.parallel.DistributedDataParallel}


def train_side(side, name, rank, seed, options, num_steps=NUM_STEPS):
    """Digests of all parameters after every step, and the losses."""
    work = WORKLOADS[name]
    torch.manual_seed(seed + 1000 * rank)  # the replicas start apart: rank 0's must win
    model = SIDES[side](work.build(), **options)
    optimizer = work.optimizer(model)
    digests, losses = [], []
    for step in range(num_steps):
        torch.manual_seed(seed * 7919 + step * 31 + rank)  # dropout
        optimizer.zero_grad(set_to_none=step % 3 != 1)
        loss = work.loss(model(*work.batch(generator(seed, step, rank))))
        loss.backward()
        optimizer.step()
        digests.append(digest(list(model.parameters())))
        losses.append(loss.item())
    return digests, losses


def train_both(rank, _num_ranks, name, seed, options, num_steps=NUM_STEPS):
    return {side: train_side(side, name, rank, seed, options, num_steps) for side in SIDES}


def same_bits(results):
    """Ours equals torch's and every rank equals rank 0, step by step."""
    ours = [result["ours"][0] for result in results]
    theirs = [result["torch"][0] for result in results]
    assert all(digests == ours[0] for digests in ours), "our ranks differ"
    assert ours == theirs, "ours differs from torch's"
    assert [result["ours"][1] for result in results] == [result["torch"][1] for result in results]


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_twenty_steps_give_the_same_bits(name):
    """Every kind of model, default options: parameters bitwise torch's after each of 20 steps."""
    same_bits(pool(2).run(train_both, name, 5, {}))


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_cap_mb": 0.0005},
        {"bucket_cap_mb_list": [1, 2]},
        {"find_unused_parameters": True, "bucket_cap_mb": 0.001},
        {"static_graph": True, "bucket_cap_mb": 0.001},
        {"gradient_as_bucket_view": True},
        {"batched_grad_copy": True},
        {"forward_sync_buffers": False},
        {"skip_all_reduce_unused_params": True},
    ],
    ids="+".join,
)
@pytest.mark.parametrize("name", ["conv_bn", "mixed_dtypes"])
def test_options_give_the_same_bits(name, options):
    """Every option that changes how, not what, leaves the bits alone."""
    if name == "mixed_dtypes" and options.get("static_graph"):
        options = {"static_graph": True}
    same_bits(pool(2).run(train_both, name, 6, options, 7))  # buckets are cut anew after the first


def accumulate_and_clip(rank, _num_ranks, seed, window):
    results = {}
    for side, ddp_class in SIDES.items():
        torch.manual_seed(seed)
        model = ddp_class(Mlp(), bucket_cap_mb=0.001)
        optimizer = sgd(model)
        digests, norms = [], []
        for step in range(NUM_STEPS):
            for micro_step in range(window):
                last = micro_step == window - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    x = torch.randn(6, 8, generator=generator(seed, step, micro_step, rank))
                    squares(model(x)).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
            optimizer.step()
            optimizer.zero_grad()
            digests.append(digest(list(model.parameters())))
        results[side] = (digests, norms)
    return results


@pytest.mark.parametrize("window", [1, 3])
def test_accumulation_and_clipping_give_the_same_bits(window):
    """`no_sync` windows and `clip_grad_norm_`: norms and parameters bitwise torch's."""
    same_bits(pool(2).run(accumulate_and_clip, 8, window))


def several_modules(rank, _num_ranks, seed):
    results = {}
    for side, ddp_class in SIDES.items():
        torch.manual_seed(seed)
        first = ddp_class(Mlp(), bucket_cap_mb=0.001)
        second = ddp_class(nn.Linear(4, 4))
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.05, momentum=0.9)
        digests, losses = [], []
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            x = torch.randn(6, 8, generator=generator(seed, step, rank))
            loss = squares(second(first(x))) + squares(first(-x))
            loss.backward()
            optimizer.step()
            digests.append(digest([*first.parameters(), *second.parameters()]))
            losses.append(loss.item())
        results[side] = (digests, losses)
    return results


def test_several_modules_in_one_loss_give_the_same_bits():
    """Two wrapped modules in one graph, one of them used twice."""
    same_bits(pool(2).run(several_modules, 9))


def ignored_parameters(rank, _num_ranks, seed):
    """Gradients and start values of a module that ignores a root-level and a nested name."""
    torch.manual_seed(seed + rank)
    model = DistributedDataParallel(IgnoresSome())
    start = {name: value.detach().clone() for name, value in model.module.named_parameters()}
    squares(model(torch.randn(6, 8, generator=generator(seed, rank)))).backward()
    return {
        name: (digest([start[name]]), digest([value.grad])) for name, value in model.module.named_parameters()
    }


def test_ignored_parameters_are_left_alone():
    """Ignored parameters, root-level ones too, are neither broadcast nor reduced; the others are both.

    Torch reduces a root-level one all the same, because its reducer calls it ".w".
    """
    first, second = pool(2).run(ignored_parameters, 10)
    for name in ("body.weight", "body.bias", "local.bias"):
        assert first[name] == second[name], name
    assert first["local.weight"][0] != second["local.weight"][0]
    for name in ("local.weight", "w"):
        assert first[name][1] != second[name][1], name


def amp_steps(rank, _num_ranks, seed, overflow_rank):
    results = {}
    for side, ddp_class in SIDES.items():
        torch.manual_seed(seed)
        model = ddp_class(Mlp(), bucket_cap_mb=0.001)
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
        digests, scales = [], []
        for step in range(10):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = squares(model(torch.randn(6, 8, generator=generator(seed, step, rank))).float())
            if rank == overflow_rank and step == 5:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            digests.append(digest(list(model.parameters())))
            scales.append(scaler.get_scale())
        results[side] = (digests, scales)
    return results


@pytest.mark.parametrize("overflow_rank", [None, 1])
def test_autocast_and_grad_scaler_give_the_same_bits(overflow_rank):
    """bf16 autocast with a GradScaler; an overflow on one rank makes every rank skip that step."""
    results = pool(2).run(amp_steps, 11, overflow_rank)
    same_bits(results)
    digests, scales = results[0]["ours"]
    assert (digests[5] == digests[4]) is (overflow_rank is not None)
    assert (scales[5] < scales[4]) is (overflow_rank is not None)
