"""`overlap_forward` of two models at once, whose optimizers each step parameters of both."""

import warnings

import pytest
import torch
from torch import nn

from harness.models import digest, generator
from harness.ranks import pool
from paceline import DistributedDataParallel
from paceline.optim import overlap

pytestmark = pytest.mark.processes

STEPS = 9


class Run:
    """A training of an encoder and a decoder, with or without overlap."""

    def __init__(self, rank, mode, makes):
        torch.manual_seed(0)
        self.rank, self.mode, self.num_deferred = rank, mode, 0
        nets = [nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(2)]
        self.models = [
            DistributedDataParallel(net, overlap_forward=mode, bucket_cap_mb=0.0005) for net in nets
        ]
        named = [(name, p) for model in self.models for name, p in model.named_parameters()]
        parts = [[p for name, p in named if name.endswith(kind)] for kind in ("weight", "bias")]
        self.optimizers = [make(part) for make, part in zip(makes, parts, strict=True)]
        if mode:
            pairs = zip(self.optimizers, self.models, strict=True)
            self.optimizers = [overlap(optimizer, model) for optimizer, model in pairs]

    def step(self, number, trained=(0, 1), *, set_to_none=True):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)
        x = torch.randn(4, 16, generator=generator(self.rank, number))
        for place in trained:
            x = self.models[place](x)
        x.square().mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()
        if self.mode:
            self.num_deferred += sum(model.forward_overlap.has_outstanding for model in self.models)

    def result(self):
        states = [optimizer.state_dict()["state"] for optimizer in self.optimizers]
        of_optimizers = [
            value
            for state in states
            for place in sorted(state)
            for value in state[place].values()
            if isinstance(value, torch.Tensor)
        ]
        return digest([p for model in self.models for p in model.parameters()] + of_optimizers)


def together(run):
    for number in range(STEPS):
        run.step(number)


def in_turn(run):
    """Steps of one model come while those of the other are outstanding."""
    for number in range(2 * STEPS):
        run.step(number, (number % 2,))


def zeroed_in_place(run):
    for number in range(STEPS):
        run.step(number, set_to_none=False)


def state_is_read(run):
    for number in range(STEPS):
        run.step(number)
        for optimizer in run.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
        if number % 3 == 2:
            run.result()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


CASES = {
    case.__name__: (case, makes)
    for case, makes in (
        (together, (sgd, sgd)),
        (in_turn, (adamw, sgd)),
        (zeroed_in_place, (sgd, adamw)),
        (state_is_read, (adamw, adamw)),
    )
}


def all_cases(rank, _num_ranks):
    warnings.simplefilter("ignore")
    found = {}
    for name, (case, makes) in CASES.items():
        without, with_it = (Run(rank, mode, makes) for mode in (False, "always"))
        case(without)
        case(with_it)
        found[name] = without.result(), with_it.result(), with_it.num_deferred
    return found


def test_optimizers_of_both_models_make_the_same_bits():
    """Every parameter takes every step, whichever model its optimizer went through overlap() with."""
    for found in pool(2).run(all_cases):
        for name, (without, with_it, num_deferred) in found.items():
            assert with_it == without, name
            assert num_deferred >= STEPS, name
