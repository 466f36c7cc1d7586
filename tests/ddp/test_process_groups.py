"""Over any process group: several in turn, sub-groups, a Python one, in debug mode, and of one rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.models import Mlp, conv_net, digest, generator, squares
from harness.ranks import Ranks, pool
from paceline import DistributedDataParallel

pytestmark = pytest.mark.processes


def gradients_and_error(model, alone, rank, members, seed, num_steps=4):
    """Largest error against one process, and a digest of the last gradients."""
    worst = 0.0
    for step in range(num_steps):
        model.zero_grad()
        alone.zero_grad()
        for r in members:
            x = torch.randn(4, 8, generator=generator(seed, step, r), dtype=torch.float64)
            if r == rank:
                squares(model(x)).backward()
            (squares(alone(x)) / len(members)).backward()
        pairs = zip(model.module.parameters(), alone.parameters(), strict=True)
        worst = max([worst, *((p.grad - q.grad).abs().max().item() for p, q in pairs)])
    return worst, digest([p.grad for p in model.parameters()])


def mlp(seed):
    torch.manual_seed(seed)
    return Mlp(dtype=torch.float64)


def round_robin(rank, num_ranks, seed, num_groups):
    groups = [dist.new_group() for _ in range(num_groups)]
    used = []
    model = DistributedDataParallel(mlp(seed), process_group=groups, bucket_cap_mb=0.0001)
    result = gradients_and_error(model, mlp(seed), rank, range(num_ranks), seed)
    used = [dist.distributed_c10d._world.pg_names[g] for g in groups]
    return *result, len(set(used)) == num_groups


@pytest.mark.parametrize("num_groups", [1, 2, 3, 5])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_round_robin_over_several_groups(num_ranks, num_groups):
    """process_group=[g0, g1, ...]: buckets take turns over the groups; same gradients."""
    results = pool(num_ranks).run(round_robin, 1, num_groups)
    assert max(worst for worst, _, _ in results) < 1e-12
    assert len({bits for _, bits, _ in results}) == 1


def subgroups(rank, _num_ranks, seed):
    """Two groups of two ranks each train models of their own."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = rank // 2
    torch.manual_seed(seed + rank)
    model = DistributedDataParallel(Mlp(dtype=torch.float64), process_group=halves[mine])
    torch.manual_seed(seed + 2 * mine)
    alone = Mlp(dtype=torch.float64)
    return gradients_and_error(model, alone, rank, [2 * mine, 2 * mine + 1], seed)


def test_subgroups_train_independently():
    """Rank 0 of the group, not of the world, is the source; each half has its own mean."""
    results = pool(4).run(subgroups, 2)
    assert max(worst for worst, _ in results) < 1e-12
    assert results[0][1] == results[1][1] != results[2][1] == results[3][1]


class Forwarding(dist.ProcessGroup):
    """A process group in Python, which hands everything to Gloo and counts."""

    def __init__(self, rank, size, inner):
        super().__init__(rank, size)
        self.inner = inner
        self.calls = []

    def getBackendName(self):  # noqa: N802
        return "forwarding"

    def _forward(self, name, *args):
        self.calls.append(name)
        return getattr(self.inner, name)(*args)

    def allreduce(self, *args):
        return self._forward("allreduce", *args)

    def broadcast(self, *args):
        return self._forward("broadcast", *args)

    def allgather(self, *args):
        return self._forward("allgather", *args)

    def barrier(self, *args):
        return self._forward("barrier", *args)

    def reduce(self, *args):
        return self._forward("reduce", *args)


def python_group(rank, num_ranks, seed, how):
    inner = dist.distributed_c10d._get_default_group()
    made = []

    def create(_store, group_rank, group_size, _timeout):
        made.append(Forwarding(group_rank, group_size, inner))
        return made[-1]

    if how == "registered":
        if "forwarding" not in dist.Backend.backend_list:
            dist.Backend.register_backend("forwarding", create, devices=["cpu"])
        else:
            dist.Backend._plugins["FORWARDING"] = dist.Backend._plugins["FORWARDING"]._replace(
                creator_fn=create
            )
        group = dist.new_group(backend="forwarding")
    else:
        group = create(None, rank, num_ranks, None)
    model = DistributedDataParallel(mlp(seed), process_group=group, bucket_cap_mb=0.0001)
    worst, bits = gradients_and_error(model, mlp(seed), rank, range(num_ranks), seed)
    return worst, bits, made[-1].calls.count("allreduce")


@pytest.mark.parametrize("how", ["registered", "handed over"])
def test_a_process_group_written_in_python(how):
    """A ProcessGroup subclass carries all buckets, registered as a backend or handed over as an object."""
    results = pool(2).run(python_group, 3, how)
    assert max(worst for worst, _, _ in results) < 1e-12
    assert results[0][1] == results[1][1]
    assert min(num for _, _, num in results) >= 4


def debug_steps(rank, num_ranks, seed):
    torch.manual_seed(seed)
    DistributedDataParallel(conv_net())
    model = DistributedDataParallel(mlp(seed), bucket_cap_mb=0.0001)
    result = gradients_and_error(model, mlp(seed), rank, range(num_ranks), seed)
    return *result, dist.get_debug_level().name


@pytest.mark.parametrize("level", ["DETAIL", "INFO"])
def test_torch_distributed_debug(level):
    """TORCH_DISTRIBUTED_DEBUG=DETAIL, which ends torch's constructor with a segmentation fault on Gloo."""
    with Ranks(2, env={"TORCH_DISTRIBUTED_DEBUG": level}) as ranks:
        for worst, _, name in ranks.run(debug_steps, 4):
            assert worst < 1e-12
            assert name == level


def alone_in_the_world(rank, num_ranks, seed):
    model = DistributedDataParallel(mlp(seed))
    return gradients_and_error(model, mlp(seed), rank, range(num_ranks), seed)[0]


def test_one_rank():
    """World size 1: the gradients are the local ones, bit by bit."""
    assert pool(1).run(alone_in_the_world, 5) == [0.0]


def two_models(rank, num_ranks, seed):
    """Two models on two groups whose backwards interleave."""
    groups = [dist.new_group(), dist.new_group()]
    models = [DistributedDataParallel(mlp(seed + i), process_group=g) for i, g in enumerate(groups)]
    losses = []
    for i, model in enumerate(models):
        x = torch.randn(4, 8, generator=generator(seed, i, rank), dtype=torch.float64)
        losses.append(squares(model(x)))
    sum(losses).backward()
    worst = 0.0
    for i, model in enumerate(models):
        alone = mlp(seed + i)
        for r in range(num_ranks):
            x = torch.randn(4, 8, generator=generator(seed, i, r), dtype=torch.float64)
            (squares(alone(x)) / num_ranks).backward()
        pairs = zip(model.module.parameters(), alone.parameters(), strict=True)
        worst = max([worst, *((p.grad - q.grad).abs().max().item() for p, q in pairs)])
    return worst


def test_several_models_in_one_backward():
    """One backward through two wrapped modules on different groups reduces both."""
    assert max(pool(2).run(two_models, 6)) < 1e-12


def without_a_group(_rank, _num_ranks):
    dist.destroy_process_group()
    DistributedDataParallel(nn.Linear(2, 2))


def test_without_a_process_group():
    """Before init_process_group the constructor says so, in torch's words."""
    for outcome in pool(2).outcomes(without_a_group):
        assert outcome.error is not None
        assert "Default process group has not been initialized" in outcome.error.message


def collectives_of_the_user(rank, num_ranks, seed):
    """A user's own collective inside backward, on the same group, between the buckets."""
    model = DistributedDataParallel(mlp(seed), bucket_cap_mb=0.0001)
    sums = []

    def all_reduce(gradient):
        total = gradient.sum().clone()
        dist.all_reduce(total)
        sums.append(total.item())
        return gradient

    model.module.layers[1].weight.register_hook(all_reduce)
    worst, bits = gradients_and_error(model, mlp(seed), rank, range(num_ranks), seed)
    return worst, bits, sums


def test_a_users_collective_inside_backward():
    """A collective in a tensor hook, on the same group, meets its counterpart and harms nothing."""
    first, second = pool(2).run(collectives_of_the_user, 7)
    assert max(first[0], second[0]) < 1e-12
    assert first[1:] == second[1:]


def replaced_group(rank, num_ranks, seed):
    model = DistributedDataParallel(mlp(seed))
    gradients_and_error(model, mlp(seed), rank, range(num_ranks), seed, num_steps=2)
    model._update_process_group(dist.new_group())
    return gradients_and_error(model, mlp(seed), rank, range(num_ranks), seed)


def test_update_process_group():
    """`_update_process_group` moves a model to another group, and training goes on."""
    results = pool(2).run(replaced_group, 8)
    assert max(worst for worst, _ in results) < 1e-12
