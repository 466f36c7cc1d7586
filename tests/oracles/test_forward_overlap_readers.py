"""`overlap_forward`: who reads at an awkward moment, in another thread or in another context, sees whole steps, too."""

import warnings

import pytest
import torch
from torch import nn

from models import digest, generator
from paceline import DistributedDataParallel
from paceline.optim import overlap
from ranks import pool

STEPS = 6
PUT_OFF_FROM = 3  # the ranks measure three steps


class Run:
    """A training of a small net of three layers, each in a bucket of its own."""

    def __init__(self, rank, mode, make=None, **options):
        torch.manual_seed(0)
        warnings.simplefilter("ignore")
        layers = (nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))
        self.rank, self.net = rank, nn.Sequential(*layers)
        self.model = DistributedDataParallel(
            self.net, overlap_forward=mode, bucket_cap_mb=0.002, init_sync=True, **options
        )
        self.mode, self.num_put_off = mode, 0
        self.use(make or (lambda parameters: torch.optim.SGD(parameters, lr=0.01)))

    def use(self, make, **options):
        self.optimizer = make(self.model.parameters())
        if self.mode:
            self.optimizer = overlap(self.optimizer, self.model, **options)

    def batch(self, *parts):
        return torch.randn(8, 16, generator=generator(self.rank, *parts))

    def step(self, *parts):
        self.optimizer.zero_grad()
        self.model(self.batch(*parts)).square().mean().backward()
        self.optimizer.step()
        self.num_put_off += bool(self.mode) and self.model.forward_overlap.has_outstanding

    def result(self):
        return digest(list(self.model.parameters()))


def read_between(rank, _num_ranks, who):
    """70 steps, after each of which one weight is read; the ranks agree on an order in four of them."""
    runs = []
    for mode in (False, "always"):
        run = Run(rank, mode)
        for step in range(70):
            run.step(step)
            if rank in who:
                float(run.net[4].weight.norm())
        runs.append(run)
    without, with_it = runs
    return with_it.result() == without.result(), with_it.num_put_off


@pytest.mark.parametrize("who", [(0, 1), (0,)], ids=["all ranks", "rank 0"])
def test_one_weight_is_read_after_every_step(who):
    assert pool(2).run(read_between, who) == [(True, 70 - PUT_OFF_FROM)] * 2
