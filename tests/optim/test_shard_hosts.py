"""Sharded steps over the backend `paceline` on emulated hosts: bytes that cross between hosts, and the same bits."""

import pytest
import torch
from torch import nn

from harness.models import digest, generator
from harness.ranks import pool
from harness.several_hosts import group_on
from paceline import DistributedDataParallel
from paceline.optim import shard

pytestmark = pytest.mark.processes


class Counted:
    """A Gloo group that counts the bytes that this rank sends to other hosts."""

    def __init__(self, gloo, hosts, rank):
        self.gloo, self.hosts, self.me, self.crossed = gloo, hosts, rank, 0

    def __getattr__(self, name):
        return getattr(self.gloo, name)

    def _count(self, to, size_bytes):
        self.crossed += size_bytes * (self.hosts[to] != self.hosts[self.me])

    def send(self, tensors, to, tag):
        self._count(to, tensors[0].nbytes)
        return self.gloo.send(tensors, to, tag)

    def alltoall_base(self, received, sent, sizes, sent_sizes, options):
        for to, size in enumerate(sent_sizes):
            self._count(to, size * sent.itemsize)
        return self.gloo.alltoall_base(received, sent, sizes, sent_sizes, options)

    def allgather(self, outputs, inputs, options):
        others = len(self.hosts) - 1
        self._count(
            (self.me + 1) % len(self.hosts), others * inputs[0].nbytes
        )  # Gloo passes rows on in a ring
        return self.gloo.allgather(outputs, inputs, options)


def step_bytes(rank, num_ranks, hosts):
    """Return the bytes that cross in a plain and in a sharded step, those of the parameters, and both models' bits."""
    crossed, bits = [], []
    with group_on(hosts, rank) as group:
        inner = Counted(group._inner, hosts, rank)
        group._collectives._inner = group._across._inner = inner
        for is_sharded in (False, True):
            torch.manual_seed(0)
            layers = nn.Sequential(*(nn.Linear(200, 200) for _ in range(8)))
            model = DistributedDataParallel(layers, process_group=group)
            optimizer = torch.optim.AdamW(model.parameters())
            optimizer = shard(optimizer, model) if is_sharded else optimizer
            for step in range(4):
                inner.crossed = 0
                model(torch.randn(4, 200, generator=generator(step, rank))).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            crossed.append(inner.crossed)
            bits.append(digest(list(model.parameters())))
    return crossed, sum(p.nbytes for p in layers.parameters()), bits


@pytest.mark.parametrize("hosts", ["aabb", "abab", "aab"])
def test_each_byte_crosses_once_for_each_host(hosts):
    """With equal hosts as many bytes as in an all-reduce that joins the ranks of a host; always with its bits."""
    found = pool(len(hosts)).run(step_bytes, hosts)
    assert len({bits for _, _, both in found for bits in both}) == 1
    if hosts == "aab":  # hosts of unequal size do not join their ranks
        return
    size_bytes = found[0][1]
    for host in "ab":
        own = [crossed for (crossed, _, _), where in zip(found, hosts, strict=True) if where == host]
        plain, sharded = map(sum, zip(*own, strict=True))
        assert size_bytes <= plain < 1.02 * size_bytes  # 2 (H - 1) / H of them, for two hosts
        assert size_bytes <= sharded < 1.02 * plain
