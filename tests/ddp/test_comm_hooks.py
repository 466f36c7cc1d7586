"""Communication hooks: torch's contract, torch's own hooks unchanged, on Gloo."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
    register_ddp_comm_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

from harness.models import MixedDtypes, Mlp, digest, generator, sgd, squares
from harness.ranks import pool
from paceline import DistributedDataParallel

pytestmark = pytest.mark.processes

TorchDdp = nn.parallel.DistributedDataParallel


def mean_error(rank, num_ranks, hook_name, seed, num_steps):
    """Largest relative distance of any gradient from the mean, over the steps; and a digest of the last ones."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(Mlp(width=32), bucket_cap_mb=0.002)
    torch.manual_seed(seed)
    alone = Mlp(width=32)
    state, hook = HOOKS[hook_name](model)
    model.register_comm_hook(state, hook)
    worst = 0.0
    for step in range(num_steps):
        model.zero_grad()
        alone.zero_grad()
        for r in range(num_ranks):
            x = torch.randn(6, 8, generator=generator(seed, step, r))
            if r == rank:
                squares(model(x)).backward()
            (squares(alone(x)) / num_ranks).backward()
        scale = max(q.grad.abs().max().item() for q in alone.parameters())
        pairs = zip(model.module.parameters(), alone.parameters(), strict=True)
        worst = max([worst, *((p.grad - q.grad).abs().max().item() / scale for p, q in pairs)])
    return worst, digest([p.grad for p in model.parameters()])


def power_sgd(_model):
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=64, start_powerSGD_iter=2, random_seed=1
    )


def own_hook(_state, bucket):
    """A user's hook in the usual style: asynchronous, scaled afterwards."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / dist.get_world_size())


class CallableHook:
    """A hook that is an object."""

    def __call__(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return own_hook(state, bucket)


def hook_with_more(state, bucket, factor):
    return own_hook(state, bucket).then(lambda future: future.value() * factor)


def synchronous_hook(_state, bucket):
    dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


HOOKS = {
    "allreduce": lambda _: (None, default_hooks.allreduce_hook),
    "fp16": lambda _: (None, default_hooks.fp16_compress_hook),
    "bf16": lambda _: (None, default_hooks.bf16_compress_hook),
    "fp16 wrapper": lambda _: (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "bf16 wrapper": lambda _: (None, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),
    "powerSGD": lambda model: (power_sgd(model), powerSGD_hook.powerSGD_hook),
    "fp16 wrapper of powerSGD": lambda model: (
        power_sgd(model),
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    ),
    "post localSGD": lambda _: (
        post_localSGD_hook.PostLocalSGDState(dist.group.WORLD, None, 100),
        post_localSGD_hook.post_localSGD_hook,
    ),
    "quantization per tensor": lambda _: (None, quantization_hooks.quantization_pertensor_hook),
    "quantization per channel": lambda _: (None, quantization_hooks.quantization_perchannel_hook),
    "own": lambda _: (None, own_hook),
    "own, synchronous": lambda _: (None, synchronous_hook),
    "callable object": lambda _: (None, CallableHook()),
    "partial": lambda _: (None, functools.partial(hook_with_more, factor=1.0)),
    "lambda": lambda _: (None, lambda _state, bucket: own_hook(None, bucket)),
}
# Relative to the largest gradient: half the spacing of the narrow type, doubled for the sum; quantization is unsigned
# 8-bit over the range of a tensor, and summed over two ranks.
TOLERANCES = {
    "fp16": 2e-3,
    "fp16 wrapper": 2e-3,
    "bf16": 2e-2,
    "bf16 wrapper": 2e-2,
    "fp16 wrapper of powerSGD": 2e-3,
    "quantization per tensor": 5e-2,
    "quantization per channel": 1.5,  # has no useful bound
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("hook", sorted(HOOKS))
def test_hooks_give_the_mean(hook):
    """Every hook that approximates the mean does so within what its wire format loses; ranks hold the same bits."""
    (first, bits), (second, same_bits) = pool(2).run(mean_error, hook, 1, 5)
    assert bits == same_bits
    assert max(first, second) < TOLERANCES.get(hook, 1e-5)


def against_torch(rank, _num_ranks, hook_name, seed):
    """Digests after each of ten steps with ours and with torch's."""
    results = []
    for ddp_class in (DistributedDataParallel, TorchDdp):
        torch.manual_seed(seed)
        model = ddp_class(Mlp())
        state, hook = HOOKS[hook_name](model)
        model.register_comm_hook(state, hook)
        optimizer = sgd(model)
        digests = []
        for step in range(10):
            optimizer.zero_grad()
            squares(model(torch.randn(6, 8, generator=generator(seed, step, rank)))).backward()
            optimizer.step()
            digests.append(digest(list(model.parameters())))
        results.append(digests)
    return results


@pytest.mark.parametrize("hook", ["allreduce", "fp16", "own", "own, synchronous", "post localSGD"])
def test_elementwise_hooks_give_torchs_bits(hook):
    """A hook that treats elements one by one gives torch's bits, whatever the buckets."""
    for ours, theirs in pool(2).run(against_torch, hook, 3):
        assert ours == theirs


def registered_by_type(rank, num_ranks, name, seed):
    torch.manual_seed(seed)
    model = DistributedDataParallel(Mlp())
    register_ddp_comm_hook(DDPCommHookType[name], model, dist.group.WORLD if "POWER" not in name else None)
    for step in range(2):
        model.zero_grad()
        squares(model(torch.randn(6, 8, generator=generator(seed, step, rank)))).backward()
    return digest([p.grad for p in model.parameters()]), num_ranks


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(kind.name for kind in DDPCommHookType))
def test_every_hook_type_registers(name):
    """`register_ddp_comm_hook` takes every DDPCommHookType; all but NOOP leave the ranks equal."""
    first, second = pool(2).run(registered_by_type, name, 4)
    assert (first == second) is (name != "NOOP")


def builtin(rank, num_ranks, name, seed):
    torch.manual_seed(seed)
    model = DistributedDataParallel(Mlp())
    model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, name))
    torch.manual_seed(seed)
    alone = Mlp()
    for r in range(num_ranks):
        x = torch.randn(6, 8, generator=generator(seed, r))
        if r == rank:
            squares(model(x)).backward()
        (squares(alone(x)) / num_ranks).backward()
    pairs = zip(model.module.parameters(), alone.parameters(), strict=True)
    return max((p.grad - q.grad).abs().max().item() for p, q in pairs)


@pytest.mark.parametrize("name", ["ALLREDUCE", "FP16_COMPRESS"])
def test_builtin_hooks(name):
    """The hooks that torch has in C++ are taken by name."""
    assert max(pool(2).run(builtin, name, 5)) < 1e-3


def what_a_hook_sees(rank, _num_ranks, seed, build, options):
    """Per step, what each call of the hook was given."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(build(), **options)
    steps = []

    def look(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients, parameters = bucket.gradients(), bucket.parameters()
        known = {id(p) for p in model.module.parameters()}
        steps[-1].append(
            {
                "state": state,
                "index": bucket.index(),
                "is_last": bucket.is_last(),
                "elements": bucket.buffer().numel() == sum(g.numel() for g in gradients),
                "shapes": [g.shape for g in gradients] == [p.shape for p in parameters],
                "known": all(id(p) in known for p in parameters),
                "flat": bucket.buffer().dim() == 1,
                "views": all(
                    g.untyped_storage().data_ptr() == bucket.buffer().untyped_storage().data_ptr()
                    for g in gradients
                ),
                "num": len(parameters),
            }
        )
        return default_hooks.allreduce_hook(None, bucket)

    model.register_comm_hook({"my": "state"}, look)
    for step in range(3):
        steps.append([])
        model.zero_grad()
        squares(model(torch.randn(6, 8, generator=generator(seed, step, rank)))).backward()
    return steps, len(list(model.parameters()))


@pytest.mark.parametrize("build", [Mlp, MixedDtypes])
@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"bucket_cap_mb": 0.0005}], ids=str)
def test_what_a_hook_is_given(build, options):
    """Indices count from 0 to the last bucket in every step; gradients are views of the flat buffer."""
    for steps, num_parameters in pool(2).run(what_a_hook_sees, 6, build, options):
        for calls in steps:
            assert [call["index"] for call in calls] == list(range(len(calls)))
            assert [call["is_last"] for call in calls] == [False] * (len(calls) - 1) + [True]
            assert sum(call["num"] for call in calls) == num_parameters
            for call in calls:
                assert call["state"] == {"my": "state"}
                assert all(call[key] for key in ("elements", "shapes", "known", "flat", "views"))


def set_buffer_hook(rank, _num_ranks, seed):
    torch.manual_seed(seed)
    model = DistributedDataParallel(Mlp())

    def replace(_state, bucket):
        bucket.set_buffer(torch.full_like(bucket.buffer(), 3.0))
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, replace)
    squares(model(torch.randn(6, 8, generator=generator(seed, rank)))).backward()
    return all(bool((p.grad == 3).all()) for p in model.parameters())


def test_a_hook_can_replace_the_buffer():
    """`set_buffer`, and the future's value is what the gradients become."""
    assert pool(2).run(set_buffer_hook, 7) == [True, True]


def noop_then_local(rank, _num_ranks, seed):
    torch.manual_seed(seed)
    model = DistributedDataParallel(nn.Linear(4, 1, bias=False))
    model.register_comm_hook(None, noop_hook)
    x = torch.randn(3, 4, generator=generator(seed, rank))
    model(x).sum().backward()
    return torch.allclose(model.module.weight.grad[0], x.sum(0))


def test_noop_hook_leaves_gradients_local():
    """noop_hook: nothing is communicated or divided."""
    assert pool(2).run(noop_then_local, 8) == [True, True]


def hook_then_optimizer(rank, _num_ranks, seed):
    """Digests with torch's `_hook_then_optimizer` and with an ordinary optimizer."""
    from torch.distributed.optim.utils import as_functional_optim

    digests = []
    for overlapped in (True, False):
        torch.manual_seed(seed)
        model = DistributedDataParallel(Mlp(), bucket_cap_mb=0.0005)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if overlapped:
            functional = as_functional_optim(torch.optim.SGD, lr=0.1, momentum=0.9)
            state = optimizer_overlap_hooks._OptimizerHookState(functional, None)
            hook = optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, state)
            model.register_comm_hook(None, hook)
        for step in range(5):
            optimizer.zero_grad()
            squares(model(torch.randn(6, 8, generator=generator(seed, step, rank)))).backward()
            if not overlapped:
                optimizer.step()
        digests.append(digest(list(model.parameters())))
    return digests


@pytest.mark.filterwarnings("ignore")
def test_hook_then_optimizer():
    """The optimizer that steps in the hook gives the bits of one that steps after backward."""
    for overlapped, ordinary in pool(2).run(hook_then_optimizer, 9):
        assert overlapped == ordinary


def fused_optimizer(rank, _num_ranks, seed):
    digests = []
    for fused in (True, False):
        torch.manual_seed(seed)
        model = DistributedDataParallel(Mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if fused:
            model._register_fused_optim(torch.optim.SGD, lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            squares(model(torch.randn(6, 8, generator=generator(seed, step, rank)))).backward()
            if not fused:
                optimizer.step()
        digests.append(digest(list(model.parameters())))
    return digests


@pytest.mark.filterwarnings("ignore")
def test_register_fused_optim():
    """`_register_fused_optim` steps every parameter as its bucket arrives: the ordinary bits."""
    for fused, ordinary in pool(2).run(fused_optimizer, 10):
        assert fused == ordinary


def bad_hook(_rank, _num_ranks, case):
    model = DistributedDataParallel(nn.Linear(2, 2))

    def wrong_bucket(state, bucket: int) -> torch.futures.Future[torch.Tensor]:
        raise NotImplementedError

    def wrong_return(state, bucket: dist.GradBucket) -> int:
        raise NotImplementedError

    def returns_number(_state, _bucket):
        return 1

    def raises(_state, _bucket):
        raise ZeroDivisionError("inside the hook")

    def fails_later(_state, bucket):
        def fail(_future):
            raise ZeroDivisionError("inside the future")

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(fail)

    hooks = {
        "not callable": 1,
        "wrong bucket annotation": wrong_bucket,
        "wrong return annotation": wrong_return,
        "returns a number": returns_number,
        "raises": raises,
        "fails later": fails_later,
        "twice": default_hooks.allreduce_hook,
        "twice, builtin": default_hooks.allreduce_hook,
    }
    model.register_comm_hook(None, hooks[case])
    if case == "twice":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    if case == "twice, builtin":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    model(torch.ones(1, 2)).sum().backward()


BAD = {
    "not callable": ("TypeError", "Communication hook must be callable."),
    "wrong bucket annotation": (
        "ValueError",
        "Communication hook: bucket annotation should be dist.GradBucket.",
    ),
    "wrong return annotation": (
        "ValueError",
        "Communication hook: return annotation should be torch.futures.Future[torch.Tensor].",
    ),
    "returns a number": ("RuntimeError", "callback must return a torch.futures.Future object, but got"),
    "raises": ("ZeroDivisionError", "inside the hook"),
    "fails later": ("Exception", "inside the future"),
    "twice": (
        "RuntimeError",
        "register_comm_hook or register_builtin_comm_hook can only be called once.",
    ),
    "twice, builtin": (
        "RuntimeError",
        "register_comm_hook or register_builtin_comm_hook can only be called once.",
    ),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_hooks_get_torchs_words(case):
    """A hook that cannot work is refused, or its failure comes through, on every rank."""
    kind, words = BAD[case]
    for outcome in pool(2).outcomes(bad_hook, case):
        assert outcome.error is not None, outcome.story()
        assert outcome.error.is_a(kind), outcome.story()
        assert words in outcome.error.message, outcome.story()


def local_sgd(rank, _num_ranks, seed):
    """Digests per step of post-local SGD: averaged gradients, then local steps with periodic averaging."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    torch.manual_seed(seed)
    model = DistributedDataParallel(Mlp())
    subgroup, _ = dist.new_subgroups(group_size=1)
    model.register_comm_hook(
        post_localSGD_hook.PostLocalSGDState(None, subgroup, start_localSGD_iter=3),
        post_localSGD_hook.post_localSGD_hook,
    )
    optimizer = PostLocalSGDOptimizer(
        optim=torch.optim.SGD(model.parameters(), lr=0.1),
        averager=PeriodicModelAverager(period=2, warmup_steps=4),
    )
    digests = []
    for step in range(9):
        optimizer.zero_grad()
        squares(model(torch.randn(6, 8, generator=generator(seed, step, rank)))).backward()
        optimizer.step()
        digests.append(digest(list(model.parameters())))
    return digests


def test_post_local_sgd():
    """Ranks are equal while gradients are averaged, apart in local steps, equal after each model average."""
    first, second = pool(2).run(local_sgd, 11)
    equal = [a == b for a, b in zip(first, second, strict=True)]
    assert equal[:3] == [True] * 3
    assert False in equal
    assert any(equal[5:])
