"""`compression=`: real ranks, real backwards, over Gloo. Every name of the table goes through every test."""

import contextlib
import copy
import math
import os
import socket
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel.distributed import _MixedPrecision

from harness.models import MixedDtypes, Mlp, SparseNet, digest, generator, random_batch, squares, train
from harness.ranks import pool
from paceline import DistributedDataParallel
from paceline.comm.gradient_group import group_beside
from paceline.compression import Bf16, Fp16, Int8, OneBit, RandomK, TopK
from paceline.errors import ConfigurationError, PeerAbortedError
from paceline.reductions import Compressed, PowerSGD
from paceline.reductions.by_name import COMPRESSIONS

pytestmark = pytest.mark.processes

ERRORS = {
    "fp16": 1e-3,
    "bf16": 8e-3,
    "int8": 2e-2,
    "onebit": math.inf,
    "topk": math.inf,
    "randomk": math.inf,
    "powersgd": math.inf,
}
"""Of one step, relative to the largest gradient; no bound for those that send later what they leave out."""
MAKE = {
    **COMPRESSIONS,
    "int8 fed back": lambda: Compressed(Int8(stochastic=False)),
    "topk with momentum": lambda: Compressed(TopK(0.1), momentum=0.9),
    "randomk with momentum": lambda: Compressed(RandomK(0.1), momentum=0.9),
}


def wrapped(module, reduction, **kwargs):
    return DistributedDataParallel(module, compression=reduction, bucket_cap_mb=0.01, **kwargs)


def group_over(place):
    """A new group of all ranks, which gradients really go over: not through memory by themselves, if it is Gloo's."""
    group = dist.new_group(timeout=timedelta(seconds=20), backend=place)
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "1"}):
        assert group_beside(group) is group
    return group


def distances(rank, _num_ranks, place):
    """By name: how far each step's gradients are from the mean, and what they are."""
    seen, group = {}, group_over(place)
    for name in COMPRESSIONS:
        torch.manual_seed(0)
        plain = Mlp(width=64)
        twin = DistributedDataParallel(copy.deepcopy(plain), bucket_cap_mb=0.01)
        model = wrapped(plain, name, process_group=group)
        seen[name] = []
        for step in range(3):
            for each in (model, twin):
                each.zero_grad()
                squares(each(random_batch(rank, step))).backward()
            pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
            largest = max(q.grad.abs().max().item() for _, q in pairs)
            error = max((p.grad - q.grad).abs().max().item() for p, q in pairs) / largest
            seen[name].append((error, digest([p.grad for p in model.parameters()])))
    return seen


@pytest.mark.parametrize(("num_ranks", "place"), [(3, "gloo"), (3, "paceline")])
def test_near_the_mean_and_the_same_everywhere(num_ranks, place):
    """Each step within what the wire format loses, and bitwise equal on all ranks."""
    first, *others = pool(num_ranks).run(distances, place)
    assert all(seen == first for seen in others)
    for name, bound in ERRORS.items():
        assert 0 < max(error for error, _ in first[name]) < bound, name


def test_no_name_is_forgotten():
    """Every name is tested above, and makes a new object each time."""
    assert set(COMPRESSIONS) == set(ERRORS)
    for make in COMPRESSIONS.values():
        assert make() is not make()
        assert repr(make()) == repr(make())


# ---- convergence

ARRIVES = {
    **{name: (make, 0.5) for name, make in COMPRESSIONS.items()},
    "onebit": (COMPRESSIONS["onebit"], 0.2),
    "topk": (lambda: Compressed(TopK(0.2)), 0.2),
    "randomk": (lambda: Compressed(RandomK(0.2)), 0.1),
    "topk with momentum": (lambda: Compressed(TopK(0.2), momentum=0.5), 0.1),
    "randomk with momentum": (lambda: Compressed(RandomK(0.2), momentum=0.5), 0.05),
}
"""How to make it, and its learning rate: what is sent late, and then at once, wants a smaller one."""


def losses(rank, _num_ranks):
    """By name: the mean squared error of a linear model after 40 steps, each rank with rows of its own."""
    weights = torch.randn(20, 3, generator=generator(11))
    x = torch.randn(500, 20, generator=generator(12, rank))
    results = {}
    for name, (make, rate) in {"mean": (lambda: None, 0.5), **ARRIVES}.items():
        torch.manual_seed(1)
        model = wrapped(nn.Linear(20, 3, bias=False), make())
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for _ in range(40):
            optimizer.zero_grad()
            loss = (model(x) - x @ weights).square().mean()
            loss.backward()
            optimizer.step()
        results[name] = loss.item()
    return results


def test_they_all_arrive():
    """A problem with one answer: from 20, the mean gets there, those that lose little with it, all others below 1."""
    for results in pool(2).run(losses):
        print(results)
        assert results["mean"] < 1e-3
        for name in ARRIVES:
            assert results[name] < (2e-3 if name in {"fp16", "bf16", "int8"} else 1.0), name


# ---- checkpoints


class Reversed(nn.Module):
    """Layers that are used in another order than registered, so that buckets are cut anew after the first step."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(48, 4), nn.Linear(33, 48), nn.Linear(40, 33), nn.Linear(8, 40)]
        )

    def forward(self, x):
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


def train_steps(model, optimizer, rank, steps):
    train(model, (random_batch(rank, step) for step in steps), optimizer, lambda y: squares(y - 1.0))


def resumed(rank, num_ranks):
    """By name: parameters after six steps, and after three steps, a checkpoint and three more; were buckets recut?"""
    seen, group = {}, group_over("gloo")
    for name, make in MAKE.items():
        torch.manual_seed(2)
        plain = Reversed()
        whole = wrapped(copy.deepcopy(plain), make(), process_group=group)
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
        before = [bucket.members for bucket in whole.reducer.buckets]
        train_steps(whole, optimizer, rank, range(3))
        assert [bucket.members for bucket in whole.reducer.buckets] != before
        checkpoint = copy.deepcopy((whole.state_dict(), whole.reduction.state_dict()))
        train_steps(whole, optimizer, rank, range(3, 6))
        again = wrapped(copy.deepcopy(plain), make(), process_group=group)
        again.load_state_dict(checkpoint[0])
        again.reduction.load_state_dict(checkpoint[1])
        train_steps(again, torch.optim.SGD(again.parameters(), lr=0.1), rank, range(3, 6))
        amnesiac = wrapped(copy.deepcopy(plain), make(), process_group=group)
        amnesiac.load_state_dict(checkpoint[0])
        train_steps(amnesiac, torch.optim.SGD(amnesiac.parameters(), lr=0.1), rank, range(3, 6))
        seen[name] = [digest(list(each.parameters())) for each in (whole, again, amnesiac)]
    return seen


def test_resumed_training_is_bitwise_the_same():
    """With the state: as if never interrupted, though buckets are cut anew. Without: not so, if there is any state."""
    for seen in pool(2).run(resumed):
        for name, (whole, again, amnesiac) in seen.items():
            assert whole == again, name
            assert (whole != amnesiac) == (name not in {"fp16", "bf16"}), name


def foreign_states(rank, _num_ranks):
    """What loading the wrong state says; nothing is changed by it."""
    model = wrapped(Mlp(width=64), Compressed(TopK(0.1)))
    train_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(2))
    good, messages = model.reduction.state_dict(), []
    other = wrapped(nn.Linear(8, 4), Compressed(TopK(0.1)))
    for state in (
        {**good, "rank": good["rank"] + 1},
        {**good, "num_ranks": 5},
        wrapped(Mlp(width=64), "onebit").reduction.state_dict(),
        other.reduction.state_dict(),
    ):
        with pytest.raises(ConfigurationError) as caught:
            model.reduction.load_state_dict(state)
        messages.append(str(caught.value))
    unchanged = model.reduction.state_dict()["memories"]["residual"]
    assert digest(list(unchanged.values())) == digest(list(good["memories"]["residual"].values()))
    model.reduction.load_state_dict({**good, "num_ranks": 5}, strict=False)
    assert model.reduction.state_dict()["num_steps"] == 2
    assert not model.reduction.state_dict()["memories"]["residual"]
    return messages


def test_a_state_of_another_rank_or_model_is_refused():
    """And says what to do; `strict=False` takes what all ranks share."""
    for rank, messages in enumerate(pool(2).run(foreign_states)):
        assert f"rank {rank} of 2 was given the state of rank {rank + 1} of 2" in messages[0]
        assert "of 5" in messages[1]
        assert "strict=False" in messages[1]
        assert "this is the state of Compressed(OneBit" in messages[2]
        assert "another model" in messages[3]


# ---- overflow


def skipped(rank, _num_ranks):
    """By name: training with a step in which rank 1 alone overflows, and training that never saw it."""
    seen, group = {}, group_over("gloo")
    for name, make in MAKE.items():
        digests, skips = [], []
        for overflows in (True, False):
            torch.manual_seed(3)
            model = wrapped(Reversed(), make(), process_group=group)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10_000)
            model.reduction.loss_scale = scaler.get_scale
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(5):
                if step == 2 and not overflows:
                    model.reduction._num_steps += 1
                    continue
                optimizer.zero_grad()
                loss = squares(model(random_batch(rank, step)) - 1.0)
                scaler.scale(loss * (math.inf if step == 2 and rank == 1 else 1.0)).backward()
                skips.append((model.reduction.overflowed, not model.gradients_are_finite()))
                scaler.step(optimizer)
                scaler.update()
            digests.append(digest(list(model.parameters())))
        seen[name] = (*digests, skips[:5], scaler.get_scale() if overflows else None)
        state = model.reduction.state_dict()["memories"]
        assert all(t.isfinite().all() for memory in state.values() for t in memory.values())
    return seen


def test_a_step_that_overflows_on_one_rank_leaves_no_trace_on_any():
    """All ranks skip it, by GradScaler and by our own word, and go on as if it had not been, at half the loss scale."""
    first, second = pool(2).run(skipped)
    assert first == second
    for name, (with_overflow, without, skips, _) in first.items():
        assert skips == [(step == 2, step == 2) for step in range(5)], name
        assert with_overflow == without, name


def rescaled(rank, _num_ranks):
    """Parameters of two trainings whose loss scales differ, one of them changing on the way."""
    digests = []
    for scales in ([1.0] * 4, [8.0, 8.0, 2.0, 4.0]):
        torch.manual_seed(4)
        model = wrapped(Mlp(width=32), Compressed(TopK(0.1), momentum=0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, scale in enumerate(scales):
            model.reduction.loss_scale = lambda scale=scale: scale
            optimizer.zero_grad()
            (squares(model(random_batch(rank, step))) * scale).backward()
            for parameter in model.parameters():
                parameter.grad.div_(scale)
            optimizer.step()
        digests.append(digest(list(model.parameters())))
    return digests


def test_what_is_kept_follows_the_loss_scale():
    """A power of two changes no bit, also when it changes between steps."""
    for plain, scaled in pool(2).run(rescaled):
        assert plain == scaled


def aborted(rank, _num_ranks):
    """Parameters of two trainings: in one, a backward raises on rank 1 between the first step and the second."""
    digests = []
    for fails in (True, False):
        torch.manual_seed(5)
        model = wrapped(Mlp(width=32), Compressed(TopK(0.1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train_steps(model, optimizer, rank, [0])
        if fails:
            handle = model.module.layers[0].weight.register_hook(fail if rank == 1 else lambda _: None)
            with pytest.raises(ZeroDivisionError if rank == 1 else PeerAbortedError):
                squares(model(random_batch(rank, 7))).backward()
            handle.remove()
        train_steps(model, optimizer, rank, [1, 2])
        digests.append(digest(list(model.parameters())))
    return digests


def fail(_gradient):
    raise ZeroDivisionError


def test_a_backward_that_raises_leaves_no_trace():
    """What its buckets had left over is forgotten with its gradients, on all ranks."""
    (failed, clean), others = pool(2).run(aborted)
    assert failed == clean
    assert others == [failed, clean]


# ---- bytes

# Of struct tcp_info, Linux 4.19 and later. A busy machine repeats a segment of up to 64 KiB even on loopback.
TCP_INFO_BYTES_SENT, TCP_INFO_BYTES_RETRANSMITTED = slice(200, 208), slice(208, 216)


def wire_bytes():
    """What this process has sent over TCP connections that are open, each byte once."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it was the listing itself, or is no TCP connection
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            total += int.from_bytes(info[TCP_INFO_BYTES_SENT], "little")
            total -= int.from_bytes(info[TCP_INFO_BYTES_RETRANSMITTED], "little")
    return total


def counted(rank, _num_ranks):
    """By name: bytes that the reduction says it sent in a step, and those that the kernel counted."""
    seen, group = {}, group_over("gloo")
    for name, make in COMPRESSIONS.items():
        model = DistributedDataParallel(nn.Linear(500, 600), compression=make(), process_group=group)
        for step in range(2):
            dist.barrier(group)
            before = wire_bytes()
            squares(model(torch.randn(4, 500, generator=generator(step, rank)))).backward()
            dist.barrier(group)  # what others have not received yet, this one's kernel may not have sent
            sent = wire_bytes() - before
        traffic = model.reduction.last_step
        assert model.reduction.bytes_sent == 2 * traffic.sent_bytes
        seen[name] = (traffic.sent_bytes, traffic.plain_bytes, sent)
    return seen


def test_bytes_are_those_that_the_kernel_counts():
    """On all ranks together; what Gloo and the ranks' words add is less than 20 kB a rank."""
    num_ranks = 3
    ranks = pool(num_ranks).run(counted)
    for name in COMPRESSIONS:
        said, plain, sent = (sum(each[name][k] for each in ranks) for k in range(3))
        assert said <= sent < said + 20_000 * num_ranks, (name, said, sent)
        assert plain == num_ranks * (2 * (num_ranks - 1) * 4 * 600 * 501 // num_ranks)


# ---- what else may happen around it


def odd_company(rank, _num_ranks):
    """Sparse gradients, several dtypes, unused parameters, a rank without data, one rank's group: all ranks agree."""
    digests, group = [], group_over("gloo")
    for name in COMPRESSIONS:
        torch.manual_seed(6)
        sparse = wrapped(SparseNet(), name, process_group=group)
        tokens = torch.randint(0, 20, (4, 5), generator=generator(rank))
        for _ in range(2):
            squares(sparse(tokens)).backward()
        digests.append(digest([p.grad for p in sparse.parameters()]))
        if name not in {"fp16", "bf16"}:
            mixed = wrapped(MixedDtypes(), name, process_group=group)
            for step in range(2):
                squares(mixed(random_batch(rank, step))).backward()
            digests.append(digest([p.grad for p in mixed.parameters()]))
        uneven = wrapped(Mlp(width=64), name)
        with uneven.join():
            for step in range(1 + rank):
                squares(uneven(random_batch(rank, step))).backward()
        copied = copy.deepcopy(uneven)
        squares(copied(random_batch(rank, 9))).backward()
        digests.append(digest([p.grad for p in copied.parameters()]))
    return digests


def test_odd_company():
    """Whatever surrounds a compressed bucket, ranks hold the same bits."""
    first, second = pool(2).run(odd_company)
    assert first == second


def on_our_backend(rank, _num_ranks):
    """By name: the same gradients over Gloo and over shared memory?"""
    groups, seen = [group_over("gloo"), group_over("paceline")], {}
    for name, make in MAKE.items():
        digests = []
        for process_group in groups:
            torch.manual_seed(7)
            model = wrapped(Mlp(width=64), make(), process_group=process_group)
            train_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(3))
            digests.append(digest(list(model.parameters())))
        seen[name] = digests
    return seen


def test_our_backend_gives_the_same_bits_on_two_ranks():
    """There 16-bit sums are the group's own, folded in float32."""
    for seen in pool(2).run(on_our_backend):
        for name, (gloo, ours) in seen.items():
            assert gloo == ours, name


def beside_torchs_power_sgd(rank, num_ranks):
    """Relative distances from the mean of torch's hook and of ours, summed over steps with error feedback."""
    distances = []
    for kind in ("torch", "ours"):
        torch.manual_seed(8)
        plain = nn.Linear(60, 50, bias=False)
        if kind == "torch":
            model = nn.parallel.DistributedDataParallel(plain)
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            model = DistributedDataParallel(plain, compression=PowerSGD(rank=2, start_step=2))
        total, exact = torch.zeros(50, 60), torch.zeros(50, 60)
        for step in range(40):
            gradients = [torch.randn(50, 60, generator=generator(step % 3, r)) for r in range(num_ranks)]
            model.zero_grad()
            (plain.weight * gradients[rank]).sum()
            model(torch.eye(60)).t().mul(gradients[rank]).sum().backward()
            total += plain.weight.grad
            exact += sum(gradients) / num_ranks
        distances.append(((total - exact).norm() / exact.norm()).item())
    return distances


def test_power_sgd_is_as_accurate_as_torchs():
    """Over 40 steps with error feedback, both have delivered the gradients equally well."""
    for torchs, ours in pool(2).run(beside_torchs_power_sgd):
        print(torchs, ours)
        assert ours < 1.1 * torchs


# ---- refusals


def two_models(_rank, _num_ranks):
    """One object for two models; the first is kept, as one that is gone leaves the object free."""
    reduction = Compressed(TopK())
    first = DistributedDataParallel(Mlp(), compression=reduction)
    with pytest.raises(ConfigurationError, match="already reduces another model's gradients"):
        DistributedDataParallel(Mlp(), compression=reduction)
    del first


def test_an_object_belongs_to_one_model():
    """What it keeps is one model's."""
    pool(1).run(two_models)


def compression_refused(rank, _num_ranks, case):
    """What the constructor says."""
    module = MixedDtypes() if case == "dtype" else Mlp()
    kwargs = {
        "unknown": {"compression": "zip"},
        "not one": {"compression": 3},
        "both": {"compression": "fp16", "reduction": PowerSGD()},
        "mixed precision": {
            "compression": "fp16",
            "mixed_precision": _MixedPrecision(reduce_dtype=torch.bfloat16),
        },
        "dtype": {"compression": Fp16()},
        "differs": {"compression": TopK(0.1 + 0.1 * rank)},
    }[case]
    with pytest.raises((ConfigurationError, RuntimeError)) as caught:
        DistributedDataParallel(module, **kwargs)
    return str(caught.value)


REFUSED = {
    "unknown": "compression='zip' is not a compression. Give one of 'fp16', 'bf16', 'int8', 'onebit'",
    "not one": "compression=3 is not a compression",
    "both": "both decide how gradients are combined",
    "mixed precision": "compression='fp16' and mixed_precision",
    "dtype": "the gradient of 'c.weight', which is torch.bfloat16",
    "differs": "TopK(ratio=0.2)",
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_refused(case):
    """On every rank, before anything is started."""
    assert all(REFUSED[case] in message for message in pool(2).run(compression_refused, case))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Compressed("fp16"), "a Compressor is needed"),
        (lambda: Compressed(TopK(), momentum=1.0), "momentum=1.0 must be at least 0 and less than 1"),
        (lambda: Compressed(Bf16(), momentum=0.9), "with Bf16 without error feedback none does"),
        (lambda: Compressed(OneBit(), momentum=0.9), "with OneBit none does"),
        (lambda: PowerSGD(rank=0), "rank=0 must be a whole number of at least 1"),
        (lambda: PowerSGD(rank=1.5), "rank=1.5 must be a whole number"),
        (lambda: PowerSGD(min_compression_rate=0), "min_compression_rate=0 must be more than 0"),
        (lambda: PowerSGD(rank=math.nan), "rank=nan must be a whole number"),
        (lambda: PowerSGD(min_compression_rate=math.nan), "min_compression_rate=nan must be more than 0"),
        (lambda: PowerSGD(start_step=-1), "start_step=-1 must be at least 0"),
    ],
)
def test_settings_that_cannot_be(make, words):
    """Refused where they are made, with the number."""
    with pytest.raises(ConfigurationError, match=words):
        make()


class Branch(nn.Module):
    """A second layer that is used only if asked for."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16, bias=False), nn.Linear(16, 32, bias=False)

    def forward(self, x, uses_second):
        hidden = self.first(x)
        return self.second(hidden) if uses_second else hidden


def used_once(rank, _num_ranks, name):
    torch.manual_seed(0)
    model = wrapped(Branch(), MAKE[name](), find_unused_parameters=True)
    left = []
    for step in range(3):
        model.zero_grad()
        squares(model(random_batch(rank, step), step == 0)).backward()
        left.append(
            [kept["second.weight"].clone() for kept in model.reduction.state_dict()["memories"].values()]
        )
        assert (model.module.second.weight.grad is None) == (step > 0)
    assert any(kept.any() for kept in left[0])
    return all(torch.equal(*pair) for later in left[1:] for pair in zip(left[0], later, strict=True))


@pytest.mark.parametrize("name", ["onebit", "topk", "randomk", "powersgd", "topk with momentum"])
def test_what_is_left_over_waits_while_a_parameter_is_unused(name):
    """Without a gradient nothing is applied, so what would be sent for it would be lost."""
    assert all(pool(2).run(used_once, name))


class SparseScaled(nn.Module):
    """An embedding, whose gradient alone can be made infinite, and a layer."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4)

    def forward(self, factor):
        return self.layer(torch.ones(2, 4)).sum() + self.table(torch.arange(3)).sum() * factor


def overflows_in_the_table(rank, _num_ranks):
    torch.manual_seed(0)
    model = wrapped(SparseScaled(), Compressed(TopK(0.1)))
    found = []
    for factor in (1.0, math.inf if rank else 1.0, 1.0):
        model.zero_grad()
        model(factor).backward()
        found.append((model.reduction.overflowed, model.gradients_are_finite()))
    return found


def test_a_sparse_gradient_that_is_not_finite_is_an_overflow():
    """The step is skipped then, so nothing of it may be kept for the compressed ones."""
    assert pool(2).run(overflows_in_the_table) == [[(False, True), (True, False), (False, True)]] * 2
