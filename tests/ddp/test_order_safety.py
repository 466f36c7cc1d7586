"""Buckets are reduced in the same order on every rank, however late any gradient is on any rank."""

import time

import pytest
import torch

from harness.models import Mlp, generator, squares
from harness.ranks import Ranks, pool, seeded
from paceline import DistributedDataParallel

pytestmark = pytest.mark.processes

LONGEST_DELAY_S = 0.004


def delay(source):
    """A tensor hook that holds a gradient up for a random while."""
    pause_s = source.uniform(0, LONGEST_DELAY_S)

    def hold_up(gradient):
        time.sleep(pause_s)  # the fault that is injected, not a synchronization
        return gradient

    return hold_up


class Parallel(torch.nn.Module):
    """Branches whose gradients become ready in an order that this rank's shuffle decides."""

    def __init__(self, num_branches=8):
        super().__init__()
        self.branches = torch.nn.ModuleList(
            torch.nn.Linear(8, 8, dtype=torch.float64) for _ in range(num_branches)
        )
        self.order = list(range(num_branches))

    def forward(self, x):
        total = 0.0
        for index in self.order:
            total = total + torch.tanh(self.branches[index](x)) * (index + 1)
        return total


BUILDERS = {"chain": lambda: Mlp(dtype=torch.float64), "parallel": Parallel}


def largest_error(rank, num_ranks, name, seed, options, num_steps):
    """Of any gradient in any step, against one process."""
    torch.manual_seed(seed)
    alone = BUILDERS[name]()
    torch.manual_seed(seed)
    model = DistributedDataParallel(BUILDERS[name](), **options)
    worst = 0.0
    for step in range(num_steps):
        source = seeded(seed, step, rank)
        if name == "parallel":
            source.shuffle(model.module.order)
        handles = [p.register_hook(delay(source)) for p in model.parameters()]
        model.zero_grad()
        alone.zero_grad()
        for r in range(num_ranks):
            x = torch.randn(4, 8, generator=generator(seed, step, r), dtype=torch.float64)
            if r == rank:
                squares(model(x)).backward()
            (squares(alone(x)) / num_ranks).backward()
        for handle in handles:
            handle.remove()
        pairs = zip(model.module.parameters(), alone.parameters(), strict=True)
        worst = max([worst, *((p.grad - q.grad).abs().max().item() for p, q in pairs)])
    return worst


@pytest.mark.parametrize(("num_ranks", "seed"), [(2, 0), (2, 1), (4, 2)])
@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_random_delays_give_the_reference_result(num_ranks, name, seed):
    """Each gradient late by a random time, differently on each rank, one bucket a parameter: still the mean."""
    options = {"bucket_cap_mb": 0.0001}
    assert max(pool(num_ranks).run(largest_error, name, seed, options, 6)) < 1e-12


def launch_in_pairs(by_readiness):
    """A `Reducer._launch_ready` that waits for two full buckets and launches them by readiness, or by index."""

    def launch_ready(self, backward):
        last = len(self.buckets) - 1
        while (place := backward.sync.num_launched) + 1 < last:
            pair = self.buckets[place : place + 2]
            if not all(bucket.ready_s for bucket in pair):
                return
            for bucket in sorted(pair, key=lambda b: b.ready_s if by_readiness else b.index):
                self._launch(backward, bucket)

    return launch_ready


def error_of_mutant(rank, num_ranks, seed, by_readiness):
    from paceline.ddp.reducer import Reducer

    Reducer._launch_ready = launch_in_pairs(by_readiness)  # this process ends with the test
    return largest_error(rank, num_ranks, "parallel", seed, {"bucket_cap_mb": 0.0001}, 6)


def test_a_mutant_that_launches_by_readiness_is_caught():
    """Launching pairs of buckets in the order in which they filled corrupts gradients or breaks communication."""
    with Ranks(2, group_timeout_s=5.0) as ranks:
        outcomes = ranks.outcomes(error_of_mutant, 0, True)
        assert not all(outcome.clean for outcome in outcomes) or max(o.value for o in outcomes) > 1e-3


def test_the_mutants_control_is_right():
    """Launching the same pairs by index is right, so it is the order that the mutant was caught for."""
    with Ranks(2) as ranks:
        assert max(ranks.run(error_of_mutant, 0, False)) < 1e-12
