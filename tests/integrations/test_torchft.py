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


def make_group(rank, num_ranks):
    """One of torchft's, configured for all ranks, the manager that watches over it, and what has to live as long."""
    from torchft import Manager, process_group
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=num_ranks) if rank == 0 else None
    where = [None if lighthouse is None else lighthouse.address().rpartition(":")[2]]
    dist.broadcast_object_list(where, src=0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=process_group.ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=num_ranks,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://127.0.0.1:{where[0]}",
        replica_id=f"replica_{rank}",
        hostname="127.0.0.1",
        init_sync=False,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
    )
    return manager, (lighthouse, store)


def train(rank, num_ranks, is_managed):
    from torchft import process_group

    manager, held = make_group(rank, num_ranks)
    manager.start_quorum()
    manager.wait_quorum()  # configures its group
    group = process_group.ManagedProcessGroup(manager) if is_managed else manager._pg
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    alone, model = copy.deepcopy(net), DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.0001)
    worst, commits = 0.0, []
    for step in range(4):
        if step:
            manager.start_quorum()
        model.zero_grad()
        alone.zero_grad()
        for r in range(num_ranks):
            x = torch.randn(5, 8, generator=generator(step, r), dtype=torch.float64)
            if r == rank:
                squares(model(x)).backward()
            (squares(alone(x)) / num_ranks).backward()
        commits.append(manager.should_commit())
        pairs = zip(model.module.parameters(), alone.parameters(), strict=True)
        worst = max([worst, *((p.grad - q.grad).abs().max().item() for p, q in pairs)])
    bits = digest([p.grad for p in model.parameters()])
    dist.barrier()  # the lighthouse is rank 0's
    manager.shutdown(wait=False)
    del held
    return worst, bits, all(commits)


@pytest.mark.parametrize("is_managed", [False, True], ids=["Gloo's", "the manager's"])
def test_its_process_groups_carry_our_buckets(is_managed):
    """Gradients are those of one process, the same bits on both ranks, and the manager commits each step."""
    results = pool(2).run(train, is_managed)
    assert max(worst for worst, _, _ in results) < 1e-12
    assert len({bits for _, bits, _ in results}) == 1
    assert all(committed for _, _, committed in results)
