"""What combines gradients follows other ranks: residuals, factors, hooks, searches."""

import pytest
import torch
import torch.distributed as dist

from harness.models import digest, squares
from harness.ranks import pool
from harness.rebuilding import batch, bits_of, mlp, train_steps
from paceline import DistributedDataParallel
from paceline.reductions import PowerSGD
from paceline_recipes import GradientNoiseScale
from paceline_servers import ParameterServers

pytestmark = pytest.mark.processes


def compressed(rank, _num_ranks, compression):
    model = DistributedDataParallel(mlp(), compression=compression)
    train_steps(model, rank, range(3))
    group, everyone = dist.new_group([0, 2]), dist.new_group([0, 1, 2])
    before = model.reduction.state_dict()
    bits = []
    if rank != 1:
        model.membership.rebuild(group)
        after = model.reduction.state_dict()
        kept = all(
            torch.equal(value, after["memories"][kind][name])
            for kind, by_name in before["memories"].items()
            for name, value in by_name.items()
        )
        factors = before.get("factors", {}).keys() == after.get("factors", {}).keys()
        residuals = sum(v.abs().sum().item() for by in after["memories"].values() for v in by.values())
        bits += [kept, factors, residuals > 0]
        bits += train_steps(model, rank, range(3, 6))
    model.membership.rebuild(everyone, source=0)
    again = model.reduction.state_dict()
    bits.append((again["num_steps"], len(again.get("factors", {}))))
    return bits, train_steps(model, rank, range(6, 9)), bits_of(model)


@pytest.mark.processes
@pytest.mark.parametrize("compression", ["onebit", "topk", PowerSGD(rank=1, start_step=0)], ids=str)
def test_residuals_stay_with_their_ranks(compression):
    """Kept over a rebuild; what must be equal on all ranks begins anew where some have made other steps."""
    first, middle, last = pool(3).run(compressed, compression)
    assert first[0] == last[0]
    assert first[0][:3] == [True, True, True]
    assert first[0][-1] == (0, 0)
    assert first[1:] == middle[1:] == last[1:]


def reduced(rank, _num_ranks, options):
    if options.get("reduction") == "noise scale":
        options = {"reduction": GradientNoiseScale(every=3)}
    model = DistributedDataParallel(mlp().float() if "compression" in options else mlp(), **options)
    dtype = next(model.parameters()).dtype
    group = dist.new_group([0, 2])

    def steps(numbers):
        for step in numbers:
            model.zero_grad()
            squares(model(batch(step, rank).to(dtype))).backward()
            yield digest([p.grad for p in model.parameters()])

    list(steps(range(4)))
    if rank == 1:
        return None
    model.membership.rebuild(group)
    return list(steps(range(4, 9)))


@pytest.mark.processes
@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "adasum"},
        {"reduction": "noise scale"},
        {"compression": "int8"},
        {"compression": "auto"},
        {"skip_all_reduce_unused_params": True},
        {"find_unused_parameters": True},
        {"forward_sync_buffers": False, "static_graph": True},
    ],
    ids=str,
)
def test_options_follow(options):
    """Ranks stay bitwise equal."""
    first, _, last = pool(3).run(reduced, options)
    assert first == last
    assert len(set(first)) == 5


def hooked(rank, _num_ranks, builtin):
    model = DistributedDataParallel(mlp())
    if builtin:
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    else:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        model.register_comm_hook(dist.group.WORLD, allreduce_hook)
    train_steps(model, rank, range(2))
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    model.membership.rebuild(group)
    return train_steps(model, rank, range(2, 4))


@pytest.mark.processes
@pytest.mark.parametrize("builtin", [True, False])
def test_a_hook_whose_state_is_the_group_follows(builtin):
    """Torch's all-reduce hook takes the new group for its state."""
    first, _, last = pool(3).run(hooked, builtin)
    assert first == last


def test_servers_that_step_are_refused():
    """They keep the optimizer's state for the ranks that they have met."""
    servers = ParameterServers(["127.0.0.1:9"])
    group = object()
    assert not servers.why_not_over(group)
    servers.step_by(object())
    assert "the servers step an optimizer" in servers.why_not_over(group)
