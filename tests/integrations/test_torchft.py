"""torchft's process groups, which are written in Python, carry our buckets as any other group does.

Skipped without torchft, which only benchmarks need otherwise (`benchmarks/peers-requirements.txt`).
"""

import copy
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from models import digest, generator, squares
from paceline import DistributedDataParallel
from ranks import pool

pytest.importorskip("torchft.process_group")
TIMEOUT = timedelta(seconds=30)


def make_group(kind, rank, num_ranks):
    """One of torchft's, configured for all ranks, and the store that it meets in."""
    from torchft import process_group

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = [store.port if store is not None else None]
    dist.broadcast_object_list(port, src=0)
    group = process_group.ProcessGroupGloo(timeout=TIMEOUT)
    if kind == "that swallows errors":
        group = process_group.ErrorSwallowingProcessGroupWrapper(group)
    group.configure(f"127.0.0.1:{port[0]}/{kind}", f"replica {rank}", rank, num_ranks)
    return group, store


def train(rank, num_ranks, kind):
    group, store = make_group(kind, rank, num_ranks)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    alone, model = copy.deepcopy(net), DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.0001)
    worst = 0.0
    for step in range(4):
        model.zero_grad()
        alone.zero_grad()
        for r in range(num_ranks):
            x = torch.randn(5, 8, generator=generator(step, r), dtype=torch.float64)
            if r == rank:
                squares(model(x)).backward()
            (squares(alone(x)) / num_ranks).backward()
        pairs = zip(model.module.parameters(), alone.parameters(), strict=True)
        worst = max([worst, *((p.grad - q.grad).abs().max().item() for p, q in pairs)])
    bits = digest([p.grad for p in model.parameters()])
    dist.barrier()  # the store is rank 0's
    del store
    return worst, bits


@pytest.mark.parametrize("kind", ["of Gloo", "that swallows errors"])
def test_its_process_groups_carry_our_buckets(kind):
    """Gradients are those of one process, and the same bits on both ranks."""
    results = pool(2).run(train, kind)
    assert max(worst for worst, _ in results) < 1e-12
    assert results[0][1] == results[1][1]
