"""Optimizers across ranks and models with servers that are dropped leave no thread, descriptor or shared memory."""

import gc
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.ranks import LIMIT_S, pool
from harness.running_servers import in_threads
from paceline import DistributedDataParallel
from paceline_adasum import AdasumOptimizer
from paceline_recipes import DiLoCo, LocalSGD
from paceline_servers import ParameterServers, ServerOptimizer

pytestmark = pytest.mark.processes

STEPS = 5
NUM_WARM = 2  # what is opened once stays
NUM_DROPPED = 4


def stepped_by(kind, **settings):
    return lambda net: (net, kind(torch.optim.SGD(net.parameters(), lr=0.01), **settings))


def by_servers(addresses):
    def make(net):
        model = DistributedDataParallel(net, reduction=ParameterServers(addresses))
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    return make


def stepped_by_servers(addresses):
    def make(net):
        model, optimizer = by_servers(addresses)(net)
        return model, ServerOptimizer(optimizer, model)

    return make


OPTIMIZERS = {
    "AdasumOptimizer": stepped_by(AdasumOptimizer),
    "LocalSGD": stepped_by(LocalSGD, every=2),
    "DiLoCo, int8": stepped_by(DiLoCo, every=2, compression="int8"),
}
WITH_SERVERS = {"ParameterServers": by_servers, "ServerOptimizer": stepped_by_servers}


def train_and_drop(make):
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    model, optimizer = make(net)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()


def held():
    """Of this process: threads, descriptors, and mappings of shared memory."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared = sum(line.split()[1].endswith("s") for line in maps)
    return *(len(list(Path("/proc/self", name).iterdir())) for name in ("task", "fd")), shared


def drop_many(make):
    """What is held once the first have been dropped, and once the others have."""
    for number in range(NUM_WARM + NUM_DROPPED):
        train_and_drop(make)
        gc.collect()
        if number == NUM_WARM - 1:
            before = held()
    until_s = time.monotonic() + LIMIT_S  # threads that were told to end do so when they run next
    while any(now > once for now, once in zip(held(), before, strict=True)) and time.monotonic() < until_s:
        time.sleep(0.01)
    return before, held()


def drop_all(rank, num_ranks):
    warnings.simplefilter("ignore")
    torch.manual_seed(rank)
    found = {name: drop_many(make) for name, make in OPTIMIZERS.items()}
    with in_threads(1) as mine:
        addresses = [""] * num_ranks
        dist.all_gather_object(addresses, mine[0])
        found |= {name: drop_many(make(addresses)) for name, make in WITH_SERVERS.items()}
        dist.barrier()
    return found


@pytest.mark.lab
def test_nothing_is_left_of_dropped_optimizers():
    for found in pool(2).run(drop_all, deadline_s=100):
        for name, (before, after) in found.items():
            assert all(now <= once for now, once in zip(after, before, strict=True)), (name, before, after)
