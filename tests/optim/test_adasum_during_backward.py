"""Updates that are combined while backward runs: the same bits as after it, and what comes too late."""

import copy

import pytest
import torch
from torch import nn

from models import WORKLOADS, Mlp, digest, generator
from paceline.errors import ConfigurationError
from paceline.optim import AdasumOptimizer, adasum_during_backward
from ranks import pool

OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


class Branches(nn.Module):
    """Two heads, of which each rank uses another, or both."""

    def __init__(self):
        super().__init__()
        self.late, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x, rank, both):
        hidden = torch.tanh(self.late(x))
        hidden = (
            hidden + (hidden.square() * self.late.bias.detach()).sum()
        )  # read again, and gives no gradient
        left, right = (
            (self.left(hidden) if rank or both else 0),
            (self.right(hidden) if both or not rank else 0),
        )
        return left + right


def twins(build, make):
    """Two equal models: one stepped during backward, one after it, in the same buckets."""
    torch.manual_seed(0)
    model = build()
    pair = [model, copy.deepcopy(model)]
    before = adasum_during_backward.LEAST_BYTES, adasum_during_backward.MOST_BUCKETS
    adasum_during_backward.LEAST_BYTES, adasum_during_backward.MOST_BUCKETS = 64, 8
    try:
        return pair, [AdasumOptimizer(make(each.parameters()), overlap=True) for each in pair]
    finally:
        adasum_during_backward.LEAST_BYTES, adasum_during_backward.MOST_BUCKETS = before


def train(rank, num_ranks, optimizer_name, workload_name, accumulates):
    workload = WORKLOADS[workload_name]
    (model, twin), (during, after) = twins(workload.build, OPTIMIZERS[optimizer_name])

    def backward(of, step, micro):
        workload.loss(of(*workload.batch(generator(rank, step, micro)))).backward()

    for step in range(4):
        for of, optimizer in ((model, during), (twin, after)):
            of.zero_grad()
            if accumulates:
                with optimizer.no_sync():
                    backward(of, step, 0)
        before = digest(list(model.parameters()))
        backward(model, step, 1)
        with after.no_sync():
            backward(twin, step, 1)
        assert during._during.has_launched == (step > 0)  # the first looks whether gradients are local
        assert not after._during.has_launched
        assert digest(list(model.parameters())) == before  # until step
        for optimizer in (during, after):
            optimizer.step()
        assert digest(list(model.parameters())) == digest(list(twin.parameters())) != before
        assert during.reduction.orthogonality == after.reduction.orthogonality
    assert len(during._flats) > 1
    return digest(list(model.parameters()))


@pytest.mark.parametrize(
    ("num_ranks", "optimizer", "workload", "accumulates"),
    [(2, "adam", "mlp", False), (3, "momentum", "mlp", True), (2, "momentum", "tied", False)],
)
def test_the_same_bits_as_after_backward(num_ranks, optimizer, workload, accumulates):
    """Every update is under way when backward ends, parameters change in step alone, ranks are bitwise equal."""
    assert len(set(pool(num_ranks).run(train, optimizer, workload, accumulates))) == 1


def train_branches(rank, num_ranks):
    """Also a backward that raises on one rank after the first bucket: its step takes what gradients are there."""
    (model, twin), (during, after) = twins(Branches, OPTIMIZERS["momentum"])
    for step in range(4):
        x = torch.randn(5, 8, generator=generator(rank, step))
        model.zero_grad(), twin.zero_grad()
        raises = step == 2 and rank == 0
        for of, optimizer in ((model, during), (twin, after)):
            hidden = x.clone().requires_grad_()
            if raises:
                of.late.weight.register_hook(_fail)
            loss = of(hidden, rank, step % 2).square().sum()
            if optimizer is after:
                with after.no_sync():
                    _backward(loss, raises)
            else:
                _backward(loss, raises)
                launched = len(during._during._pending)
                assert launched == (0 if step == 0 else 1 if raises else len(during._flats))
            if raises:
                of.late.weight._backward_hooks.clear()
        for optimizer in (during, after):
            optimizer.step()
        assert digest(list(model.parameters())) == digest(list(twin.parameters()))
    return digest(list(model.parameters()))


def _fail(gradient):
    raise ZeroDivisionError


def _backward(loss, raises):
    try:
        loss.backward()
    except ZeroDivisionError:
        assert raises


def test_what_a_rank_does_not_use():
    """Buckets are launched in one order, whatever is ready; parameters that backward still reads have their values."""
    assert len(set(pool(2).run(train_branches))) == 1


def refused(rank, num_ranks):
    parameters = list(Mlp().parameters())
    with pytest.raises(ConfigurationError, match="SparseAdam is not known to step each parameter by its own"):
        AdasumOptimizer(torch.optim.SparseAdam(parameters), overlap=True)
    (model, _), (optimizer, _) = twins(Mlp, OPTIMIZERS["adam"])
    loss = lambda step: model(torch.randn(3, 8, generator=generator(rank, step))).square().sum()  # noqa: E731
    with pytest.raises(ConfigurationError, match="was given a closure"):
        optimizer.step(lambda: 0.0)
    optimizer.grad_scale = torch.ones(())
    with pytest.raises(ConfigurationError, match="before a GradScaler can divide"):
        optimizer.step()
    del optimizer.grad_scale
    loss(0).backward()
    optimizer.step()
    loss(1).backward()
    before = digest(list(model.parameters()))
    with pytest.raises(ConfigurationError, match="a second backward brings it another gradient"):
        loss(2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(ConfigurationError, match="gradients were changed between backward and step"):
        optimizer.step()
    assert digest(list(model.parameters())) == before
    model.zero_grad()
    loss(3).backward()
    optimizer.step()
    return digest(list(model.parameters()))


def test_refused():
    """A second backward, clipping, a closure, a scaler: parameters stay, and the next step is right again."""
    assert len(set(pool(2).run(refused))) == 1
