"""LocalSGD and DiLoCo against the same computed in one process; checkpoints, traffic, and ranks that lose step."""

import copy
import itertools
import os
import signal
import threading
from unittest import mock

import pytest
import torch
from torch import nn

from harness.models import WORKLOADS, Mlp, conv_net, digest, generator, squares
from harness.ranks import pool
from paceline import DistributedDataParallel
from paceline.compression import TopK
from paceline.errors import ConfigurationError, PeerLostError, ProtocolError, ReplicaMismatchError
from paceline_recipes import DiLoCo, LocalSGD
from paceline_recipes.local_steps import AveragedBuffers

pytestmark = pytest.mark.processes

INNER = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}
OUTER = {
    "local sgd": LocalSGD,
    "diloco": DiLoCo,
    "diloco heavy ball": lambda inner, every: DiLoCo(inner, every, 0.5, 0.8, nesterov=False),
    "diloco as local sgd": lambda inner, every: DiLoCo(inner, every, 1.0, 0.0),
}
SETTINGS = {  # of torch's SGD on the outer gradient
    "local sgd": {"lr": 1.0},
    "diloco": {"lr": 0.7, "momentum": 0.9, "nesterov": True},
    "diloco heavy ball": {"lr": 0.5, "momentum": 0.8},
    "diloco as local sgd": {"lr": 1.0},
}


def backward(model, rank, step, workload=WORKLOADS["mlp"]):
    model.zero_grad()
    batch = (x.double() if x.is_floating_point() else x for x in workload.batch(generator(rank, step)))
    workload.loss(model(*batch)).backward()


def one_process(model, inner, outer, num_ranks, num_steps, every, workload):
    """The same with replicas, and torch's SGD as outer optimizer on the mean of (where it was - where each went)."""
    replicas = [copy.deepcopy(model) for _ in range(num_ranks)]
    inners = [INNER[inner](replica.parameters()) for replica in replicas]
    center = [p.detach().clone().requires_grad_() for p in model.parameters()]
    outside = torch.optim.SGD(center, **SETTINGS[outer])
    for step in range(num_steps):
        for rank, (replica, optimizer) in enumerate(zip(replicas, inners, strict=True)):
            backward(replica, rank, step, workload)
            optimizer.step()
        if (step + 1) % every:
            continue
        for place, parameter in enumerate(center):
            reached = [list(replica.parameters())[place].detach() for replica in replicas]
            parameter.grad = parameter.detach() - torch.stack(reached).mean(0)
        outside.step()
        for replica in replicas:
            for mine, parameter in zip(replica.parameters(), center, strict=True):
                mine.data.copy_(parameter.detach())
    return replicas


def train_with_local_steps(rank, num_ranks, inner, outer, every, name):
    workload = WORKLOADS[name]
    torch.manual_seed(rank)  # the constructor takes rank 0's parameters
    model = workload.build().double()
    torch.manual_seed(0)
    twin = workload.build().double()
    optimizer = OUTER[outer](INNER[inner](model.parameters()), every)
    started = digest(model.parameters())
    synchronized = []
    for step in range(2 * every + 1):
        backward(model, rank, step, workload)
        optimizer.step()
        if (step + 1) % every == 0:
            synchronized.append(digest(model.parameters()))
    alone = one_process(twin, inner, outer, num_ranks, 2 * every + 1, every, workload)[rank]
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    error = max((p - q).abs().max().item() for p, q in pairs)
    return error, started, synchronized, digest(model.parameters())


@pytest.mark.parametrize(
    ("num_ranks", "inner", "outer", "every", "name"),
    [
        (3, "sgd", "local sgd", 3, "mlp"),
        (2, "momentum", "local sgd", 2, "tied"),
        (3, "adamw", "diloco", 3, "mlp"),
        (2, "momentum", "diloco heavy ball", 2, "mlp"),
        (2, "adamw", "diloco as local sgd", 1, "wide_mlp"),
        (1, "adamw", "diloco", 2, "mlp"),
    ],
)
def test_it_is_one_process(num_ranks, inner, outer, every, name):
    """Also one step after a synchronization, when ranks have their own parameters; bitwise equal after each one."""
    results = pool(num_ranks).run(train_with_local_steps, inner, outer, every, name)
    assert max(error for error, *_ in results) < 1e-13
    assert len({started for _, started, *_ in results}) == 1
    assert len({tuple(synchronized) for _, _, synchronized, _ in results}) == 1
    if every > 1:
        assert len({ended for *_, ended in results}) == num_ranks


def equalities(rank, _num_ranks):
    """Largest difference of every=1 from averaging gradients; whether DiLoCo with lr 1, momentum 0 is LocalSGD."""
    torch.manual_seed(0)
    plain = Mlp(dtype=torch.float64)
    wrapped = DistributedDataParallel(copy.deepcopy(plain))
    others = [copy.deepcopy(plain) for _ in range(2)]
    steppers = [
        (wrapped, INNER["sgd"](wrapped.parameters())),
        (plain, LocalSGD(INNER["sgd"](plain.parameters()), every=1)),
        (others[0], LocalSGD(INNER["adamw"](others[0].parameters()), every=2)),
        (others[1], DiLoCo(INNER["adamw"](others[1].parameters()), 2, outer_lr=1.0, outer_momentum=0.0)),
    ]
    for step, (model, optimizer) in itertools.product(range(4), steppers):
        backward(model, rank, step)
        optimizer.step()
    pairs = zip(plain.parameters(), wrapped.parameters(), strict=True)
    averaged = max((p - q).abs().max().item() for p, q in pairs)
    return averaged, digest(others[0].parameters()) == digest(others[1].parameters())


def test_what_equals_what():
    """Every step, plain SGD: averaging gradients, to rounding. Outer rate 1, momentum 0: LocalSGD, bitwise."""
    results = pool(2).run(equalities)
    assert max(averaged for averaged, _ in results) < 1e-15
    assert all(same for _, same in results)


def with_buffers(rank, _num_ranks, averages):
    torch.manual_seed(0)
    model = conv_net()
    start = copy.deepcopy(dict(model.named_buffers()))
    buffers = model.buffers() if averages else ()
    optimizer = LocalSGD(INNER["momentum"](model.parameters()), every=2, buffers=buffers)
    x = [torch.randn(4, 3, 8, 8, generator=generator(rank, step)) for step in range(2)]
    for batch in x:
        model.zero_grad()
        squares(model(batch)).backward()
        optimizer.step()
    moved = not torch.equal(start["1.running_mean"], model[1].running_mean)
    return model[1].running_mean.tolist(), int(model[1].num_batches_tracked), moved, digest(model.buffers())


def with_odd_buffers(rank, _num_ranks, dtypes):
    """Buffers of types that no backend sums, after an exchange; those of float32 beside them are averaged."""
    torch.manual_seed(rank)
    model = nn.Linear(3, 2)
    buffers = [torch.tensor([rank, 2.0]).to(dtype) for dtype in (torch.float32, *dtypes)]
    optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), every=1, buffers=buffers)
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    return [buffer.float().tolist() for buffer in buffers]


def test_buffers_of_any_dtype():
    dtypes = [torch.bool, torch.uint16, torch.uint32, torch.int64, torch.float8_e4m3fn]
    for first, flags, *others in pool(2).run(with_odd_buffers, dtypes):
        assert first == [0.5, 2.0]
        assert flags == [0.0, 1.0]
        assert others == [[0.0, 2.0]] * 4


def test_buffers_are_averaged_if_given():
    """Running statistics; the counter stays one. Left out, they are each rank's own."""
    (left, _, _, own), (right, _, _, others) = pool(2).run(with_buffers, False)
    assert own != others
    (mean, count, moved, same), (_, _, _, too) = pool(2).run(with_buffers, True)
    assert same == too
    assert moved
    assert count == 2
    assert torch.allclose(torch.tensor(mean), (torch.tensor(left) + torch.tensor(right)) / 2, atol=1e-6)


def counted(rank, num_ranks, compression):
    torch.manual_seed(0)
    model = Mlp()
    num_bytes = sum(p.numel() * 4 for p in model.parameters())
    optimizer = LocalSGD(INNER["sgd"](model.parameters()), every=4, compression=compression)
    for step in range(9):
        model.zero_grad()
        squares(model(torch.randn(3, 8, generator=generator(rank, step)))).backward()
        optimizer.step()
    sent, plain = optimizer.traffic.sent_bytes, optimizer.traffic.plain_bytes
    one = 2 * (num_ranks - 1) * num_bytes // num_ranks
    assert optimizer.traffic.saved_bytes == plain - sent
    optimizer.synchronize()  # after the ninth step
    return sent / one, plain / one, optimizer.traffic.sent_bytes / one, digest(model.parameters())


@pytest.mark.parametrize(("compression", "share"), [(None, 1.0), ("bf16", 0.5), ("int8", 0.25)])
def test_traffic_is_counted(compression, share):
    """Two synchronizations in nine steps, and one by hand; compressed changes are shorter still."""
    results = pool(2).run(counted, compression)
    for sent, plain, after, _ in results:
        assert sent == pytest.approx(2 * share, rel=0.05)
        assert plain == 8
        assert after == pytest.approx(3 * share, rel=0.05)
    assert len({bits for *_, bits in results}) == 1


def resumed(rank, num_ranks, kind, saved_after):
    make = {
        "LocalSGD": lambda p: LocalSGD(INNER["adamw"](p), 3),
        "LocalSGD, residuals": lambda p: LocalSGD(INNER["adamw"](p), 3, compression="topk"),
        "DiLoCo": lambda p: DiLoCo(INNER["adamw"](p), 3),
    }[kind]

    def run(model, optimizer, steps):
        for step in steps:
            backward(model, rank, step)
            optimizer.step()

    torch.manual_seed(0)
    model = Mlp(dtype=torch.float64)
    optimizer = make(model.parameters())
    run(model, optimizer, range(saved_after))
    state, values = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
    again = Mlp(dtype=torch.float64)
    other = make(again.parameters())
    for wrong, words in (
        ({**state, "rank": 1 - rank}, f"state of rank {1 - rank} of {num_ranks}"),
        ({**state, "kind": "LARS"}, "this is the state of LARS"),
        (state, "are not those that this"),  # the model has not been loaded
        (state["optimizer"], "this is not the state of an"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            other.load_state_dict(wrong)
    again.load_state_dict(values)
    other.load_state_dict(state)
    run(model, optimizer, range(saved_after, 9))
    run(again, other, range(saved_after, 9))
    assert other.traffic == optimizer.traffic
    assert str(other.state_dict()) == str(optimizer.state_dict())
    return digest(model.parameters()) == digest(again.parameters()), digest(again.parameters())


@pytest.mark.parametrize(
    ("kind", "saved_after"), [("LocalSGD", 4), ("LocalSGD, residuals", 4), ("DiLoCo", 5), ("DiLoCo", 6)]
)
def test_resuming_is_bitwise(kind, saved_after):
    """Between synchronizations, and right after one: parameters, outer momentum, residuals, counters and traffic."""
    results = pool(2).run(resumed, kind, saved_after)
    assert all(same for same, _ in results)
    assert len({bits for _, bits in results}) == 1


def different_steps(rank, _num_ranks):
    torch.manual_seed(0)
    model = Mlp(dtype=torch.float64)
    optimizer = LocalSGD(INNER["sgd"](model.parameters()), every=3)
    told = "nothing"
    for step in range(3 - rank):  # rank 1 has one batch less
        backward(model, rank, step)
        before = copy.deepcopy(model.state_dict())
        try:
            optimizer.step()
        except ProtocolError as error:
            told = str(error)
            assert digest(before.values()) != digest(model.parameters())  # of its own step
    if rank:
        before = digest(model.parameters())
        with pytest.raises(ProtocolError) as caught:
            optimizer.synchronize()  # at the epoch's end
        told = str(caught.value)
        assert digest(model.parameters()) == before
    return told


def test_ranks_that_took_different_numbers_of_steps_are_told():
    """On both, which took how many."""
    for rank, told in enumerate(pool(2).run(different_steps)):
        assert told.startswith(f"rank {rank}: the ranks took different numbers of steps since they were last")
        assert "rank 0 3, rank 1 2." in told


def loses_a_rank(rank, _num_ranks):
    model = Mlp(dtype=torch.float64)
    optimizer = DiLoCo(INNER["sgd"](model.parameters()), every=2)
    for step in range(2):
        backward(model, rank, step)
        if rank == 1 and step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        before = digest(model.parameters())
        try:
            optimizer.step()
        except PeerLostError as error:
            return str(error), before != digest(model.parameters())
    return None


def test_a_rank_lost_at_a_synchronization():
    """The other one says who is gone, well before the timeout, and keeps its own parameters."""
    outcome, lost = pool(2).outcomes(loses_a_rank)
    assert lost.exit_code == -signal.SIGKILL
    message, stepped = outcome.value
    assert "rank 0 was synchronizing after step 2 when communication failed: rank 1" in message
    assert "The parameters are this rank's own, those of its last step." in message
    assert stepped


def misuse_local_steps(rank, _num_ranks):
    parameters = list(Mlp().parameters())
    inner = INNER["sgd"](parameters)
    for every in (0, -1, 2.0):
        with pytest.raises(ConfigurationError, match=f"every={every}"):
            LocalSGD(inner, every)
    for outer in ({"outer_lr": 0.0}, {"outer_momentum": 1.0}, {"outer_lr": float("inf")}):
        with pytest.raises(ConfigurationError, match=r"The paper has 0\.7 and 0\.9"):
            DiLoCo(inner, 2, **outer)
    with pytest.raises(ConfigurationError, match=r"LocalSGD wraps a torch\.optim\.Optimizer, once"):
        LocalSGD(LocalSGD(inner, 2), 2)
    with pytest.raises(ConfigurationError, match=r"LocalSGD exchanges parameters .* and cannot be copied"):
        copy.deepcopy(LocalSGD(inner, 2))
    with pytest.raises(
        ReplicaMismatchError, match="other parameters, or another reduction, setting or version"
    ):
        LocalSGD(inner, every=2 + rank)
    with pytest.raises(
        ReplicaMismatchError, match="other parameters, or another reduction, setting or version"
    ):
        LocalSGD(inner, every=2, buffers=[torch.ones(2 + rank)])
    with pytest.raises(ConfigurationError, match='compression="auto" measures the buckets'):
        LocalSGD(inner, every=2, compression="auto")
    # Gradients that are reduced already.
    model = DistributedDataParallel(Mlp(dtype=torch.float64))
    optimizer = DiLoCo(INNER["sgd"](model.parameters()), every=2)
    backward(model, rank, 0)
    with pytest.raises(ConfigurationError, match="have been reduced already"):
        optimizer.step()
    with model.no_sync():
        backward(model, rank, 0)
    optimizer.step()
    with pytest.raises(ConfigurationError, match="1 steps since the last synchronization would be lost"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    optimizer.synchronize()
    extra = nn.Parameter(torch.full((2,), float(rank), dtype=torch.float64))
    optimizer.add_param_group({"params": [extra]})
    assert not extra.detach().any()
    extra.grad = torch.full((2,), float(rank), dtype=torch.float64)
    optimizer.step()
    optimizer.synchronize()
    return digest([*model.parameters(), extra])


def test_refused():
    """Before anything is changed, on every rank."""
    first, second = pool(2).run(misuse_local_steps)
    assert first == second


def buffers_wait(rank, _num_ranks):
    """Whether the buffers were launched while a compressor was still at work, on its own thread."""
    launched, seen = threading.Event(), []

    class Watching(TopK):
        def compress(self, *args):
            seen.append(launched.wait(0.3))
            return super().compress(*args)

    launch = AveragedBuffers.launch
    with mock.patch.object(AveragedBuffers, "launch", lambda buffers: launched.set() or launch(buffers)):
        model = conv_net().double()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = LocalSGD(inner, every=1, buffers=model.buffers(), compression=Watching(1.0))
        backward(model, rank, 0, WORKLOADS["conv_bn"])
        optimizer.step()
    assert not any(seen)
    return digest([*model.parameters(), *model.buffers()])


def test_buffers_do_not_overtake_compressed_changes():
    """Both go over one process group, so in the same order on every rank; else they meet each other's messages."""
    first, second = pool(2).run(buffers_wait)
    assert first == second
