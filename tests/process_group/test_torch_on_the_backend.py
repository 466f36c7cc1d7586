"""What runs on c10d runs on the backend `paceline`: torch's DDP, FSDP2, checkpoints, and our own DDP without a copy."""

import tempfile
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from harness.models import Mlp, digest, generator, random_batch, sgd, squares
from harness.ranks import pool
from paceline import DistributedDataParallel

pytestmark = pytest.mark.processes

NUM_STEPS = 4


def trained(wrap, rank, seed):
    torch.manual_seed(seed)
    model = wrap(Mlp(64))
    optimizer = sgd(model)  # of parameters that may be FSDP's
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        squares(model(random_batch(seed, step, rank, shape=(6, 8)))).backward()
        optimizer.step()
    return model


def digests(rank, _num_ranks, seed):
    """Parameters after training: torch's DDP on Gloo; torch's and ours on our backend; bytes ours copied meanwhile."""
    ours, gloo = dist.new_group(backend="paceline"), dist.group.WORLD
    torch_ddp = nn.parallel.DistributedDataParallel
    results = [
        digest(
            list(trained(lambda module, g=group: torch_ddp(module, process_group=g), rank, seed).parameters())
        )
        for group in (gloo, ours)
    ]
    model = trained(lambda module: DistributedDataParallel(module, process_group=ours), rank, seed)
    results.append(digest(list(model.parameters())))
    return results


def test_ddp_of_torch_and_ours_have_the_same_bits():
    """Two ranks: torch's DDP on Gloo, torch's on ours, ours on ours."""
    first, second = pool(2).run(digests, 1)
    assert len({*first, *second}) == 1


def copied_in_a_step(rank, _num_ranks, seed):
    ours = dist.new_group(backend="paceline")
    torch.manual_seed(seed)
    model = DistributedDataParallel(nn.Linear(700, 700), process_group=ours)
    counts = []
    for step in range(3):
        before = ours.copied_bytes
        model(torch.randn(2, 700, generator=generator(seed, step, rank))).sum().backward()
        counts.append(ours.copied_bytes - before)
    return counts, model.module.weight.grad.numel() * 4


def test_our_buckets_are_not_copied():
    """Gradients live in shared memory: after the first step, which sends its order, no bucket is staged."""
    for counts, size_bytes in pool(2).run(copied_in_a_step, 2):
        assert counts[-1] < size_bytes / 100


def sharded(rank, num_ranks, folder, seed):
    """FSDP2 on both groups; its checkpoint written and read over ours."""
    full = []
    for group in (dist.group.WORLD, dist.new_group(backend="paceline")):
        mesh = DeviceMesh.from_group(group, "cpu")

        def shard(module, mesh=mesh):
            for layer in module.layers:
                fully_shard(layer, mesh=mesh)
            return fully_shard(module, mesh=mesh)

        model = trained(shard, rank, seed)
        full.append([parameter.full_tensor().detach() for parameter in model.parameters()])
    state = model.state_dict()
    dcp.save(state, checkpoint_id=folder, process_group=group)
    torch.manual_seed(seed + 1)
    fresh = shard(Mlp(64))
    loaded = fresh.state_dict()
    dcp.load(loaded, checkpoint_id=folder, process_group=group)
    fresh.load_state_dict(loaded)
    again = [parameter.full_tensor().detach() for parameter in fresh.parameters()]
    worst = max((a - b).abs().max().item() for a, b in zip(*full, strict=True))
    return worst, digest(full[1]) == digest(again)


def test_fsdp2_and_checkpoints():
    """fully_shard trains to Gloo's parameters; torch.distributed.checkpoint writes and reads them over our group."""
    with tempfile.TemporaryDirectory() as folder:
        for worst, same in pool(2).run(sharded, f"{folder}/checkpoint", 3):
            assert worst == 0.0
            assert same


def test_the_backend_is_registered_whoever_is_imported_first():
    """`import paceline` alone imports no torch; with torch, before (here) or after, c10d knows the backend."""
    import subprocess
    import sys

    assert "paceline" in dist.Backend.backend_list
    assert dist.Backend("paceline") == "paceline"
    code = (
        "import paceline, sys; assert 'torch' not in sys.modules; import torch.distributed as d; "
        "print('paceline' in d.Backend.backend_list, d.Backend('paceline'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "True paceline\n", done.stderr


def asked_for_its_backends(_rank, _num_ranks):
    group = dist.new_group(backend="paceline")
    dist.distributed_c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=1))
    found = [group._get_backend(torch.device(device)) is group for device in ("cpu", "cuda")]
    dist.barrier()  # or a rank might still be connecting
    dist.destroy_process_group(group)
    return found


def test_torch_finds_the_backend_of_a_device():
    """A compiled model whose kernels come from inductor's cache makes torch ask every group of the process."""
    assert all(found == [True, True] for found in pool(2).run(asked_for_its_backends))
