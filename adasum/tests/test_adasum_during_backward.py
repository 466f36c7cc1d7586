"""Updates that are combined while backward runs: the same bits as after it, and what comes too late."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness.models import WORKLOADS, Mlp, digest, generator
from harness.ranks import pool
from paceline.errors import ConfigurationError, PeerAbortedError
from paceline_adasum import AdasumOptimizer, during_backward

pytestmark = pytest.mark.processes

OPTIMIZERS = {
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "nadam": torch.optim.NAdam,
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "adadelta": torch.optim.Adadelta,
}


class Branches(nn.Module):
    """Two heads, of which each rank uses another, or both."""

    def __init__(self):
        super().__init__()
        self.late, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x, rank, both):
        hidden = torch.tanh(self.late(x))
        hidden = (
            hidden + (hidden.square() * self.late.bias.detach()).sum()
        )  # read again, and gives no gradient
        left, right = (
            (self.left(hidden) if rank or both else 0),
            (self.right(hidden) if both or not rank else 0),
        )
        return left + right


def twins(build, make, group=None):
    """Two equal models: one stepped during backward, one after it, in the same buckets."""
    torch.manual_seed(0)
    model = build()
    pair = [model, copy.deepcopy(model)]
    before = during_backward.LEAST_BYTES, during_backward.MOST_BUCKETS
    during_backward.LEAST_BYTES, during_backward.MOST_BUCKETS = 64, 8
    try:
        return pair, [AdasumOptimizer(make(each.parameters()), group, overlap=True) for each in pair]
    finally:
        during_backward.LEAST_BYTES, during_backward.MOST_BUCKETS = before


def state_of(optimizer):
    """A digest of what the optimizer within has for each parameter, in their order."""
    tensors = []
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        held = optimizer.state.get(parameter, {})
        tensors += [torch.as_tensor(held[name]) for name in sorted(held) if held[name] is not None]
    return digest([*tensors, torch.tensor(float(len(optimizer.state)))])


def train_during_backward(rank, num_ranks, optimizer_name, workload_name, accumulates):
    workload = WORKLOADS[workload_name]
    (model, twin), (during, after) = twins(workload.build, OPTIMIZERS[optimizer_name])

    def backward(of, step, micro):
        workload.loss(of(*workload.batch(generator(rank, step, micro)))).backward()

    for step in range(4):
        for of, optimizer in ((model, during), (twin, after)):
            of.zero_grad()
            if accumulates:
                with optimizer.no_sync():
                    backward(of, step, 0)
        before = digest(list(model.parameters()))
        backward(model, step, 1)
        with after.no_sync():
            backward(twin, step, 1)
        assert during._during.has_launched == (step > 0)  # the first looks whether gradients are local
        assert not after._during.has_launched
        assert digest(list(model.parameters())) == before  # until step
        for optimizer in (during, after):
            optimizer.step()
        assert digest(list(model.parameters())) == digest(list(twin.parameters())) != before
        assert during.reduction.orthogonality == after.reduction.orthogonality
    assert len(during.flats) > 1
    return digest(list(model.parameters()))


@pytest.mark.parametrize(
    ("num_ranks", "optimizer", "workload", "accumulates"),
    [(2, "adam", "mlp", False), (3, "momentum", "mlp", True), (2, "momentum", "tied", False)],
)
def test_the_same_bits_as_after_backward(num_ranks, optimizer, workload, accumulates):
    """Every update is under way when backward ends, parameters change in step alone, ranks are bitwise equal."""
    assert len(set(pool(num_ranks).run(train_during_backward, optimizer, workload, accumulates))) == 1


def train_branches(rank, num_ranks):
    """Also a backward that raises on one rank after the first bucket: its step takes what gradients are there."""
    (model, twin), (during, after) = twins(Branches, OPTIMIZERS["momentum"])
    for step in range(4):
        x = torch.randn(5, 8, generator=generator(rank, step))
        model.zero_grad(), twin.zero_grad()
        raises = step == 2 and rank == 0
        for of, optimizer in ((model, during), (twin, after)):
            hidden = x.clone().requires_grad_()
            if raises:
                of.late.weight.register_hook(_fail)
            loss = of(hidden, rank, step % 2).square().sum()
            if optimizer is after:
                with after.no_sync():
                    _backward(loss, raises)
            else:
                _backward(loss, raises)
                launched = len(during._during._pending)
                assert launched == (0 if step == 0 else 1 if raises else len(during.flats))
            if raises:
                of.late.weight._backward_hooks.clear()
        for optimizer in (during, after):
            optimizer.step()
        assert digest(list(model.parameters())) == digest(list(twin.parameters()))
    return digest(list(model.parameters()))


def _fail(gradient):
    raise ZeroDivisionError


def _backward(loss, raises):
    try:
        loss.backward()
    except ZeroDivisionError:
        assert raises


def test_what_a_rank_does_not_use():
    """Buckets are launched in one order, whatever is ready; parameters that backward still reads have their values."""
    assert len(set(pool(2).run(train_branches))) == 1


def misuse_overlap(rank, num_ranks):
    parameters = list(Mlp().parameters())
    with pytest.raises(ConfigurationError, match="SparseAdam is not known to step each parameter by its own"):
        AdasumOptimizer(torch.optim.SparseAdam(parameters), overlap=True)
    (model, _), (optimizer, _) = twins(Mlp, OPTIMIZERS["adam"])
    loss = lambda step: model(torch.randn(3, 8, generator=generator(rank, step))).square().sum()  # noqa: E731
    with pytest.raises(ConfigurationError, match="was given a closure"):
        optimizer.step(lambda: 0.0)
    optimizer.grad_scale = torch.ones(())
    with pytest.raises(ConfigurationError, match="before a GradScaler can divide"):
        optimizer.step()
    del optimizer.grad_scale
    loss(0).backward()
    optimizer.step()
    before = digest(list(model.parameters())), state_of(optimizer)
    loss(1).backward()
    assert state_of(optimizer) != before[1]
    for use in (optimizer.state_dict, lambda: optimizer.load_state_dict({})):
        with pytest.raises(ConfigurationError, match="has updates under way"):
            use()
    with pytest.raises(ConfigurationError, match="a second backward brings one of shape"):
        loss(2).backward()
    awaited = []
    optimizer._await = lambda launched: (
        awaited.extend(launched),
        AdasumOptimizer._await(optimizer, launched),
    )
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(ConfigurationError, match="gradients were changed between backward and step"):
        optimizer.step()
    assert len(awaited) == len(optimizer.flats)  # their memory is free for the next step
    assert (digest(list(model.parameters())), state_of(optimizer)) == before
    model.zero_grad()
    loss(3).backward()
    for parameter in model.parameters():
        parameter.grad = parameter.grad.clone()
    with pytest.raises(ConfigurationError, match="zeroed or replaced"):
        optimizer.step()
    assert (digest(list(model.parameters())), state_of(optimizer)) == before
    model.zero_grad()
    loss(3).backward()
    kind, words = PeerAbortedError, "rank 1 has changed gradients between backward and step"
    if rank == 1:
        kind, words = ConfigurationError, "gradients were changed between backward and step"
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(kind, match=words):
        optimizer.step()
    assert (digest(list(model.parameters())), state_of(optimizer)) == before
    model.zero_grad()
    loss(3).backward()
    optimizer.step()
    return digest(list(model.parameters()))


def test_refused():
    """A second backward, clipping, a closure, a scaler: parameters and state stay, and the next step is right again.

    What one rank clips, all refuse: else parameters would differ from then on.
    """
    assert len(set(pool(2).run(misuse_overlap))) == 1


class Stack(nn.Sequential):
    """Layers in four buckets, the last two in one; the last `num_checkpoints` layers are in reentrant checkpoints."""

    def __init__(self):
        super().__init__(*[nn.Linear(8, 8) for _ in range(4)], nn.Linear(8, 1))

    def loss(self, rank, step, num_checkpoints=0):
        x = torch.randn(4, 8, generator=generator(rank, step)).requires_grad_()
        for place, layer in enumerate(self):
            is_plain = place < len(self) - num_checkpoints
            x = torch.tanh(layer(x) if is_plain else checkpoint(layer, x, use_reentrant=True))
        return x.square().sum()


def _backward_that_raises(loss, parameter):
    handle = parameter.register_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()


def skip_batches(rank, num_ranks, optimizer_name):
    (model, twin), (during, after) = twins(Stack, OPTIMIZERS[optimizer_name])
    num_buckets = len(during.flats)
    parameters = list(model.parameters())
    for step in range(8):
        launched = None
        if step == 2:  # one rank after some buckets, the other later
            _backward_that_raises(model.loss(rank, step), parameters[4 - 4 * rank])
            launched = [1, 3][rank]
        elif step == 4 and rank:  # one rank before backward, the other not at all
            model.loss(rank, step).backward()
            launched = num_buckets
        elif step == 6:  # both before the first bucket
            _backward_that_raises(model.loss(rank, step), parameters[-2])
            launched = 0
        if launched is not None:
            assert len(during._during._pending) == launched
        if step == 6:
            during.zero_grad()  # local
        elif step in (2, 4):
            if launched:
                with pytest.raises(ConfigurationError, match=r"zero_grad.*abort_step\(\), on all ranks"):
                    during.zero_grad()
                with pytest.raises(
                    ConfigurationError, match="To skip a batch whose backward raised, call abort_step"
                ):
                    model[0](torch.ones(1, 8)).sum().backward()  # of the last bucket
            during.abort_step()
            assert all(parameter.grad is None for parameter in parameters)
        else:
            for of, optimizer in ((model, during), (twin, after)):
                optimizer.zero_grad()
                with after.no_sync():
                    of.loss(rank, step).backward()
            assert len(during._during._pending) == (num_buckets if step else 0)
            for optimizer in (during, after):
                optimizer.step()
        assert digest(parameters) == digest(list(twin.parameters()))
        assert state_of(during) == state_of(after)
    return digest(parameters)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_a_batch_is_skipped(optimizer):
    """However far each rank's backward got: afterwards as if there had been no such batch, and it overlaps again."""
    assert len(set(pool(2).run(skip_batches, optimizer))) == 1


def skip_the_first_overlapped(rank, num_ranks, optimizer_names):
    """Parameters without any state before the batch that is skipped have none after it."""
    for name in optimizer_names:
        (model, _), (optimizer, _) = twins(Stack, OPTIMIZERS[name])
        front = list(model[0].parameters())
        for step in range(2):
            for parameter in front:
                parameter.requires_grad_(bool(step))
            before = state_of(optimizer)
            model.loss(rank, step).backward()
            if step == 0:
                optimizer.step()
        assert state_of(optimizer) != before
        optimizer.abort_step()
        assert state_of(optimizer) == before
        assert not any(parameter in optimizer.state for parameter in front)


def test_state_that_a_skipped_batch_made():
    """It goes; numbers in it, and tensors that a step replaces, are those of before."""
    pool(2).run(skip_the_first_overlapped, ["momentum", "adam", "nadam", "rprop", "asgd", "adadelta"])


class ReadAgain(nn.Module):
    """Backward reads the last layer's weight after that has its gradient: for the gradient of what it multiplies."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)) * self.last.weight.detach()[0])


def train_what_is_read_again(rank, num_ranks):
    (model, twin), (during, after) = twins(ReadAgain, OPTIMIZERS["adam"])
    seen = []
    model.first.weight.register_hook(lambda _: seen.append(len(during._during._pending)))
    for step in range(3):
        x = torch.randn(4, 8, generator=generator(rank, step))
        for of, optimizer in ((model, during), (twin, after)):
            optimizer.zero_grad()
            with after.no_sync():
                of(x).square().sum().backward()
        for optimizer in (during, after):
            optimizer.step()
        assert digest(list(model.parameters())) == digest(list(twin.parameters()))
    assert seen == [0, 1, 1]


def test_a_parameter_is_read_after_its_bucket_was_stepped():
    """Autograd refuses what was changed in place meanwhile; this was not: it has the values of before."""
    pool(2).run(train_what_is_read_again)


def unfreeze(rank, num_ranks, unfrozen):
    """Returns how many buckets were launched when the last gradient of each step's backward arrived."""
    build = Stack if unfrozen is None else lambda: frozen(Stack(), unfrozen)
    (model, _), (optimizer, _) = twins(build, OPTIMIZERS["adam"])
    seen = []
    for step in range(5):
        if step == 2:
            model.requires_grad_()
            model[0].bias.register_hook(lambda _: seen.append(len(optimizer._during._pending)))
        optimizer.zero_grad()
        model.loss(rank, step).backward()
        optimizer.step()
    return seen


def frozen(model, layers):
    for layer in layers:
        model[layer].requires_grad_(False)
    return model


def test_parameters_are_unfrozen():
    """Their buckets are launched within backward as well: at once, or from the second step on if they come first."""
    expected = pool(2).run(unfreeze, None)[0]
    assert min(expected) > 1
    assert pool(2).run(unfreeze, [0, 1]) == [expected, expected]
    late = pool(2).run(unfreeze, [3, 4])
    assert late == [[0, *expected[1:]]] * 2


class Mean(torch.autograd.Function):
    """A collective of the script's within backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        mean = gradient.clone()
        dist.all_reduce(mean, group=ctx.group)
        return mean / ctx.group.size(), None


def communicate_in_backward(rank, num_ranks, backend):
    group = dist.new_group([0, 1], backend=backend)
    if rank == 0:  # it is in one group more than rank 1, and torch names some groups by that number
        dist.new_group([0], backend="gloo", use_local_synchronization=True)
    if rank > 1:
        return None
    (model, twin), (during, after) = twins(Branches, OPTIMIZERS["momentum"], group)
    for step in range(4):
        x = torch.randn(5, 8, generator=generator(rank, step))
        for of, optimizer in ((model, during), (twin, after)):
            optimizer.zero_grad()
            hidden = Mean.apply(torch.tanh(of.late(x)), group)
            with after.no_sync():
                (of.left if rank else of.right)(hidden).square().sum().backward()
        for optimizer in (during, after):
            optimizer.step()
        assert digest(list(model.parameters())) == digest(list(twin.parameters()))
    dist.destroy_process_group(group)
    return digest(list(model.parameters()))


@pytest.mark.parametrize(("num_ranks", "backend"), [(2, "gloo"), (2, "paceline"), (3, "paceline")])
def test_the_script_communicates_in_backward(num_ranks, backend):
    """Before a bucket is launched on one rank, and after it on the other: they are not mistaken for each other."""
    assert len(set(pool(num_ranks).run(communicate_in_backward, backend)[:2])) == 1


def train_checkpoints(rank, num_ranks, num_checkpoints):
    (model, twin), (during, after) = twins(Stack, OPTIMIZERS["momentum"])
    for step in range(4):
        for of, optimizer in ((model, during), (twin, after)):
            optimizer.zero_grad()
            with after.no_sync():
                of.loss(rank, step, num_checkpoints).backward()
        assert len(during._during._pending) == (len(during.flats) if step else 0)
        for optimizer in (during, after):
            optimizer.step()
        assert digest(list(model.parameters())) == digest(list(twin.parameters()))
    return digest(list(model.parameters()))


@pytest.mark.parametrize("num_checkpoints", [1, 5])
def test_reentrant_checkpoints(num_checkpoints):
    """Their backward is nested, and its end is not the end: the rest is launched when the outer one has ended."""
    assert len(set(pool(2).run(train_checkpoints, num_checkpoints))) == 1


def replace_optimizer(rank, num_ranks):
    (model, _), (optimizer, _) = twins(Stack, OPTIMIZERS["adam"])
    inner = optimizer.optimizer
    for step in range(6):
        if step == 3:
            model.loss(rank, step).backward()  # it goes with updates under way
            del optimizer
            assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
            model.zero_grad()
            optimizer = AdasumOptimizer(inner, overlap=True)
        optimizer.zero_grad()
        model.loss(rank, step).backward()
        optimizer.step()
    assert optimizer._during.is_armed
    return digest(list(model.parameters()))


def test_an_optimizer_is_replaced():
    """One that is dropped takes part in no backward, though the optimizer within and the parameters live on."""
    assert len(set(pool(2).run(replace_optimizer))) == 1
