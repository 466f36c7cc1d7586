"""Scripted and traced modules, whole or as a child: they train as with torch's class."""

import warnings

import pytest
import torch
from torch import nn

from harness.models import digest, random_batch, squares
from harness.ranks import pool
from paceline import DistributedDataParallel

pytestmark = pytest.mark.processes

TorchDdp = nn.parallel.DistributedDataParallel


def layers():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


class Parts(nn.Module):
    """A scripted and a traced child, and others around them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.scripted, self.traced = scripted(layers()), traced(layers())

    def forward(self, x):
        return self.last(self.traced(torch.tanh(self.scripted(self.first(x)))))


def scripted(module):
    return torch.jit.script(module)


def traced(module):
    return torch.jit.trace(module, torch.ones(3, 4))


BUILDERS = {
    "scripted": lambda: scripted(layers()),
    "traced": lambda: traced(layers()),
    "a scripted and a traced part": Parts,
}
OPTIONS = [{}, {"find_unused_parameters": True}, {"static_graph": True}]


def steps(model, rank, start=0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(start, start + 3):
        optimizer.zero_grad()
        squares(model(random_batch(rank, step, shape=(5, 4)))).backward()
        optimizer.step()
    return digest(list(model.parameters()))


def built(cls, build, **options):
    torch.manual_seed(2)
    return cls(build(), **options)


def different(rank, _num_ranks):
    """What is different from torch's class."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated; no parameter is unused
        for (name, build), options in ((item, options) for item in BUILDERS.items() for options in OPTIONS):
            ours, theirs = (built(cls, build, **options) for cls in (DistributedDataParallel, TorchDdp))
            if steps(ours, rank) != steps(theirs, rank):
                found.append((name, options))
            if list(ours.state_dict()) != list(theirs.state_dict()):
                found.append((name, "names"))
        # A part with a backward of its own is looked for among all parameters, those of scripted parts, too.
        model = built(DistributedDataParallel, Parts)
        model.module.more = nn.Linear(1, 1)
        steps(model, rank)
    return found


def test_they_train_as_with_torchs_class():
    """Equal bits after three steps, whichever part is scripted."""
    assert pool(2).run(different) == [[], []]
