"""Ranks in one process are the ranks of a real job: the same bits, whatever reduces their gradients."""

import copy

import pytest
import torch
from torch import nn

from harness.models import digest, generator
from harness.ranks import pool
from paceline import DistributedDataParallel
from paceline_adasum import AdasumOptimizer
from paceline_lab.experiments.accuracy.in_process_ranks import (
    backward_of_the_mean,
    gradients_of_each,
    has_batch_statistics,
    loss_of,
)
from paceline_lab.experiments.accuracy.large_batch_rows import ROWS, make_optimizer, set_rate
from paceline_lab.experiments.accuracy.tasks import mlp, residual_cnn
from paceline_lab.experiments.accuracy.trial_training import (
    AdasumOfUpdates,
    MeanOfRanks,
    RareAverages,
    make_combination,
)
from paceline_recipes import LocalSGD, convert_ghost_batchnorm

RANK_BATCH, STEPS, RATE = 8, 4, 0.1

pytestmark = pytest.mark.usefixtures("one_thread")  # how many decides the last bits of a convolution


def model_of(name):
    torch.manual_seed(3)
    return residual_cnn(5, width=4) if name == "cnn" else mlp(64, 16, 5)


def batch(step, num_ranks):
    """A global batch: images of 8 x 8 pixels."""
    source = generator(step)
    n = num_ranks * RANK_BATCH
    return torch.randn(n, 1, 8, 8, generator=source), torch.randint(0, 5, (n,), generator=source)


def bits(model):
    return digest([*model.parameters(), *model.buffers()])


def train_for_real(rank, num_ranks, name, compression):
    """The bits of the model after a few steps of a real job."""
    bare = model_of(name)
    model = DistributedDataParallel(bare, compression=compression)
    optimizer = make_optimizer("sgd", bare)
    set_rate(optimizer, RATE)
    for step in range(STEPS):
        x, y = (tensor.split(RANK_BATCH)[rank] for tensor in batch(step, num_ranks))
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    return bits(bare) if rank == 0 else digest(list(bare.parameters()))


def train_with_adasum(rank, num_ranks, form):
    """The parameters after a few steps of a real job that combines gradients, or updates, by Adasum."""
    bare = model_of("mlp")
    optimizer = inner = make_optimizer("sgd", bare)
    if form == "adasum":
        model, optimizer = bare, AdasumOptimizer(inner)
    else:
        model = DistributedDataParallel(bare, reduction="adasum")
    set_rate(inner, RATE)
    for step in range(STEPS):
        x, y = (tensor.split(RANK_BATCH)[rank] for tensor in batch(step, num_ranks))
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    return [parameter.detach().numpy() for parameter in bare.parameters()]


def train_in_process(name, num_ranks, make):
    model = model_of(name)
    combination = make(model, num_ranks)
    for step in range(STEPS):
        combination.step(*batch(step, num_ranks), RATE)
    combination.finish()
    return model


def reduced_by(name):
    return lambda model, num_ranks: make_combination(ROWS[name], model, num_ranks)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "row", "compression"),
    [
        ("cnn", "gradual warm-up", None),  # with batch statistics: one rank after another
        ("mlp", "no compression", None),
        ("mlp", "bf16", "bf16"),  # summed on the wire
        ("mlp", "int8", "int8"),  # gathered, with random rounding of each rank's own
        ("mlp", "onebit", "onebit"),  # with error feedback
        ("mlp", "topk", "topk"),
        ("mlp", "powersgd", "powersgd"),  # communicates midway
    ],
)
def test_two_in_process_ranks_are_two_processes(name, row, compression):
    """Parameters and running statistics agree bitwise after four steps with momentum."""
    real, _ = pool(2).run(train_for_real, name, compression)
    assert bits(train_in_process(name, 2, reduced_by(row))) == real


@pytest.mark.processes
@pytest.mark.parametrize("row", ["adasum", "adasum of gradients"])
def test_in_process_adasum_is_that_of_processes(row):
    """Up to rounding: dot products are summed in another order there."""
    real, _ = pool(2).run(train_with_adasum, row)
    mine = train_in_process("mlp", 2, reduced_by(row))
    for parameter, theirs in zip(mine.parameters(), real, strict=True):
        torch.testing.assert_close(parameter.detach(), torch.from_numpy(theirs), rtol=0, atol=1e-6)


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def test_the_mean_of_a_whole_batch_is_the_mean_of_the_ranks():
    """Where no sample's output depends on the others', all ranks are computed at once: equal up to rounding."""
    whole, looped = model_of("mlp").double(), model_of("mlp").double()
    assert not has_batch_statistics(whole)
    x, y = batch(0, 8)
    backward_of_the_mean(whole, x.double(), y, 8)
    _, each = gradients_of_each(looped, x.double(), y, 8)
    for gradient, parts in zip(gradients(whole), zip(*each, strict=True), strict=True):
        torch.testing.assert_close(gradient, torch.stack(parts).mean(dim=0), rtol=0, atol=1e-14)


def test_ranks_one_after_another_equal_ghost_batches():
    """Statistics per rank: the same gradients as normalisation in groups of n over the whole batch; not the batch's."""
    looped, whole = model_of("cnn").double(), model_of("cnn").double()
    for model in (looped, whole):
        nn.init.ones_(model[3].last_norm.weight)  # so that the branch counts
    ghost = convert_ghost_batchnorm(copy.deepcopy(whole), RANK_BATCH)
    x, y = batch(0, 4)
    backward_of_the_mean(looped, x.double(), y, 4)
    loss_of(ghost, x.double(), y).backward()
    for mine, theirs in zip(gradients(looped), gradients(ghost), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)
    loss_of(whole, x.double(), y).backward()
    assert not torch.allclose(gradients(looped)[0], gradients(whole)[0], atol=1e-6)


def test_running_statistics_are_rank_0s():
    both, alone = model_of("cnn"), model_of("cnn")
    x, y = batch(0, 2)
    backward_of_the_mean(both, x, y, 2)
    backward_of_the_mean(alone, x[:RANK_BATCH], y[:RANK_BATCH], 1)
    assert digest(list(both.buffers())) == digest(list(alone.buffers()))


def test_adasum_of_one_rank_and_of_equal_ranks_is_plain_training():
    """Parallel updates are averaged: four ranks with the same samples train as one of them does."""
    plain = model_of("mlp").double()
    equal = copy.deepcopy(plain)
    one, four = MeanOfRanks(plain, 1), AdasumOfUpdates(equal, 4)
    for step in range(STEPS):
        x, y = batch(step, 1)
        one.step(x.double(), y, RATE)
        four.step(x.double().repeat(4, 1, 1, 1), y.repeat(4), RATE)
    for mine, theirs in zip(equal.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)


def train_with_local_steps(rank, num_ranks, every):
    """The bits of the parameters after a few steps of a real job that averages them now and then."""
    model = model_of("mlp")
    inner = make_optimizer("sgd", model)
    optimizer = LocalSGD(inner, every)
    set_rate(inner, RATE)
    for step in range(STEPS):
        x, y = (tensor.split(RANK_BATCH)[rank] for tensor in batch(step, num_ranks))
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    optimizer.synchronize()
    return bits(model)


@pytest.mark.processes
def test_in_process_local_steps_are_those_of_processes():
    """Bitwise, with one exchange that falls due and one at the end."""
    real, _ = pool(2).run(train_with_local_steps, 3)
    mine = train_in_process("mlp", 2, lambda model, n: RareAverages(model, n, lambda o, g: LocalSGD(o, 3, g)))
    assert bits(mine) == real


def test_more_local_steps_send_less_and_one_is_the_mean():
    """Momentum SGD is linear in the gradients, so averages of parameters and of gradients agree up to rounding."""
    mean = train_in_process("mlp", 4, reduced_by("no compression"))
    every = train_in_process("mlp", 4, reduced_by("1 local step"))
    for mine, theirs in zip(every.parameters(), mean.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
    sent = []
    for row in ("1 local step", "2 local steps", "4 local steps", "diloco, 16 local steps"):
        ranks = make_combination(ROWS[row], model_of("mlp"), 4)
        for step in range(STEPS):
            ranks.step(*batch(step, 4), RATE)
        ranks.finish()
        sent.append(ranks.sent_bytes / every_bytes())
    assert sent == [4.0, 2.0, 1.0, 1.0]  # what is left at the end is exchanged once more


def every_bytes():
    return 2 * 3 / 4 * sum(p.nbytes for p in model_of("mlp").parameters())
