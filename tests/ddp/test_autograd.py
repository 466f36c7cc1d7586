"""Autograd's other doors: checkpointing, higher derivatives, reentrant graphs, static graphs, AMP-free precision."""

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness.models import digest, generator, squares
from harness.ranks import pool
from paceline import DistributedDataParallel

pytestmark = pytest.mark.processes

TOLERANCE = 1e-12


class Checkpointed(nn.Module):
    """Layers of which some are recomputed in backward, in one of the ways of `STYLES`."""

    def __init__(self, style, width=6):
        super().__init__()
        self.style = style
        self.first = nn.Linear(6, width)
        self.second = nn.Linear(width, width)
        self.third = nn.Linear(width, width)
        if style.endswith("tied"):
            self.third.weight = self.second.weight

    def forward(self, x):
        use_reentrant = "non" not in self.style
        x = torch.tanh(self.first(x))
        x = torch.tanh(checkpoint(self.second, x, use_reentrant=use_reentrant))
        if "twice" in self.style:
            x = torch.tanh(checkpoint(self.second, x, use_reentrant=use_reentrant))
        if "all" in self.style or "tied" in self.style:
            return checkpoint(self.third, x, use_reentrant=use_reentrant)
        return self.third(x)


STYLES = [
    "reentrant once",
    "nonreentrant once",
    "reentrant all",
    "nonreentrant all",
    "reentrant twice",
    "nonreentrant twice",
    "reentrant tied",
    "nonreentrant tied",
    "reentrant twice tied",
]


def checkpoint_errors(rank, num_ranks, style, seed, options, accumulate, width=6):
    """Largest error of any gradient in any of three steps, against one process."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(Checkpointed(style, width).double(), **options)
    torch.manual_seed(seed)
    alone = Checkpointed(style, width).double()
    worst = 0.0
    for step in range(3):
        model.zero_grad()
        alone.zero_grad()
        for micro_step in range(accumulate):
            last = micro_step == accumulate - 1
            for r in range(num_ranks):
                x = torch.randn(3, 6, generator=generator(seed, step, micro_step, r), dtype=torch.float64)
                if r == rank:
                    with contextlib.nullcontext() if last else model.no_sync():
                        squares(model(x)).backward()
                (squares(alone(x)) / num_ranks).backward()
        pairs = zip(model.module.parameters(), alone.parameters(), strict=True)
        worst = max([worst, *((p.grad - q.grad).abs().max().item() for p, q in pairs)])
    return worst


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": 0.0001}, {"static_graph": True}, {"find_unused_parameters": True}],
    ids=lambda options: "+".join(options) or "default",
)
def test_checkpointing(style, options):
    """Reentrant or not, once, twice or tied, whatever the option: gradients are the mean in every step."""
    assert max(pool(2).run(checkpoint_errors, style, 1, options, 1)) < TOLERANCE


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_checkpointing_of_large_gradients(style, accumulate):
    """The same with weights above 32 KiB, each in a bucket of its own."""
    options = {"bucket_cap_mb": 0.0001}
    assert max(pool(2).run(checkpoint_errors, style, 11, options, accumulate, 72)) < TOLERANCE


@pytest.mark.parametrize("style", ["reentrant twice", "nonreentrant once"])
@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=["default", "static_graph"])
def test_checkpointing_with_accumulation(style, options):
    """The same under `no_sync`, also if the very first micro-step is not synchronized."""
    assert max(pool(2).run(checkpoint_errors, style, 2, options, 3)) < TOLERANCE


class Wide(nn.Module):
    """Twice-differentiable, with a parameter that a static graph never uses."""

    def __init__(self, *, with_unused=False):
        super().__init__()
        self.a = nn.Linear(4, 8)
        self.b = nn.Linear(8, 1)
        if with_unused:
            self.never = nn.Linear(3, 3)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def static_accumulation(rank, num_ranks, seed, window, with_unused):
    torch.manual_seed(seed)
    model = DistributedDataParallel(Wide(with_unused=with_unused).double(), static_graph=True)
    torch.manual_seed(seed)
    alone = Wide().double()
    worst = 0.0
    for step in range(4):
        model.zero_grad()
        alone.zero_grad()
        for micro_step in range(window):
            for r in range(num_ranks):
                x = torch.randn(3, 4, generator=generator(seed, step, micro_step, r), dtype=torch.float64)
                if r == rank:
                    with contextlib.nullcontext() if micro_step == window - 1 else model.no_sync():
                        squares(model(x)).backward()
                (squares(alone(x)) / num_ranks).backward()
        named = dict(model.module.named_parameters())
        worst = max(
            [worst, *((named[n].grad - q.grad).abs().max().item() for n, q in alone.named_parameters())]
        )
    never_used = not with_unused or model.module.never.weight.grad is None
    return worst, never_used


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("with_unused", [False, True])
@pytest.mark.parametrize("window", [1, 2, 4])
def test_static_graph_with_gradient_accumulation(window, with_unused):
    """static_graph and `no_sync` from the first micro-step on, which is an internal assert in torch (#143580)."""
    for worst, never_used in pool(2).run(static_accumulation, 3, window, with_unused):
        assert worst < TOLERANCE
        assert never_used


def second_order(rank, num_ranks, seed, how):
    """Error of a gradient that needs a derivative of a derivative, against one process."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(Wide().double())
    torch.manual_seed(seed)
    alone = Wide().double()

    def loss(net, parameters, r, step):
        x = torch.randn(3, 4, generator=generator(seed, step, r), dtype=torch.float64).requires_grad_()
        out = squares(net(x))
        over = x if how == "input" else parameters
        slopes = torch.autograd.grad(out, over, create_graph=True)
        return out + sum((slope**2).sum() for slope in slopes)

    worst = 0.0
    for step in range(3):
        model.zero_grad()
        alone.zero_grad()
        loss(model, list(model.module.parameters()), rank, step).backward()
        for r in range(num_ranks):
            (loss(alone, list(alone.parameters()), r, step) / num_ranks).backward()
        pairs = zip(model.module.parameters(), alone.parameters(), strict=True)
        worst = max([worst, *((p.grad - q.grad).abs().max().item() for p, q in pairs)])
    return worst


@pytest.mark.parametrize("how", ["input", "parameters"])
def test_second_derivatives(how):
    """A penalty on the gradient with respect to inputs or parameters is differentiated and averaged."""
    assert max(pool(2).run(second_order, 4, how)) < TOLERANCE


def with_create_graph(rank, num_ranks, seed):
    """`backward(create_graph=True)`: the error of the values, and whether the next plain step is right too."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(nn.Linear(4, 1, bias=False).double())
    xs = [torch.randn(3, 4, generator=generator(seed, r), dtype=torch.float64) for r in range(num_ranks)]
    weight = model.module.weight
    errors = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for create_graph in (True, False, True):
            model.zero_grad()
            (model(xs[rank]) ** 2).sum().backward(create_graph=create_graph)
            mean = sum(2 * (x @ weight.t()).t() @ x for x in xs) / num_ranks
            errors.append((weight.grad - mean).abs().max().item())
    return max(errors)


def test_create_graph_gives_the_mean():
    """Values are reduced with create_graph, and the step after it is clean."""
    assert max(pool(2).run(with_create_graph, 5)) < TOLERANCE


def autograd_grad_only(rank, num_ranks, seed):
    torch.manual_seed(seed)
    model = DistributedDataParallel(nn.Linear(4, 1, bias=False))
    xs = [torch.randn(3, 4, generator=generator(seed, r)) for r in range(num_ranks)]
    (local,) = torch.autograd.grad(model(xs[rank]).sum(), [model.module.weight])
    is_local = torch.allclose(local[0], xs[rank].sum(0)) and model.module.weight.grad is None
    model(xs[rank]).sum().backward()
    mean = sum(x.sum(0) for x in xs) / num_ranks
    return is_local, torch.allclose(model.module.weight.grad[0], mean)


def test_autograd_grad_does_not_synchronize():
    """`torch.autograd.grad` returns this rank's gradient, and the next backward is the mean."""
    assert pool(2).run(autograd_grad_only, 6) == [(True, True)] * 2


def no_sync_is_read_at_backward(rank, _num_ranks, seed):
    """Whether gradients are local after a backward in no_sync, and shared after one outside."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(nn.Linear(4, 1, bias=False))
    x = torch.randn(3, 4, generator=generator(seed, rank))
    loss = model(x).sum()
    with model.no_sync():
        loss.backward()
    local = torch.allclose(model.module.weight.grad[0], x.sum(0))
    model.zero_grad()
    with model.no_sync():
        loss = model(x).sum()
    loss.backward()
    model.require_backward_grad_sync = False
    model(x).sum().backward()
    model.require_backward_grad_sync = True
    return local, digest([model.module.weight.grad - x.sum(0)])


def test_no_sync_is_decided_at_backward():
    """`with ddp.no_sync(): loss.backward()` alone stays local; a backward outside it synchronizes."""
    assert [local for local, _ in pool(2).run(no_sync_is_read_at_backward, 7)] == [True, True]


def no_sync_nests_and_restores(_rank, _num_ranks):
    model = DistributedDataParallel(nn.Linear(2, 2))
    seen = []
    with contextlib.suppress(KeyError), model.no_sync():
        with model.no_sync():
            seen.append(model.require_backward_grad_sync)
        seen.append(model.require_backward_grad_sync)
        raise KeyError
    return [*seen, model.require_backward_grad_sync]


def test_no_sync_nests_and_restores():
    """The flag is what it was after leaving, also by an exception, also nested."""
    assert pool(2).run(no_sync_nests_and_restores) == [[False, False, True]] * 2


def through_a_custom_function(rank, num_ranks, seed):
    """A custom autograd Function that runs a backward of its own inside backward."""

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            with torch.enable_grad():
                x2, w2 = x.detach().requires_grad_(), weight.detach().requires_grad_()
                torch.autograd.backward(x2 @ w2.t(), grad)
            return x2.grad, w2.grad

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 2)

        def forward(self, x):
            return Inner.apply(torch.tanh(self.first(x)), self.second.weight) + self.second.bias

    torch.manual_seed(seed)
    model = DistributedDataParallel(Net().double(), bucket_cap_mb=0.0001)
    torch.manual_seed(seed)
    alone = Net().double()
    xs = [torch.randn(3, 4, generator=generator(seed, r), dtype=torch.float64) for r in range(num_ranks)]
    squares(model(xs[rank])).backward()
    for x in xs:
        (squares(alone(x)) / num_ranks).backward()
    return max(
        (p.grad - q.grad).abs().max().item()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True)
    )


def test_a_backward_inside_backward():
    """An inner backward over other tensors ends neither the outer one nor its reduction."""
    assert max(pool(2).run(through_a_custom_function, 8)) < TOLERANCE


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(requires_grad=False)
        self.live = nn.Linear(4, 1)

    def forward(self, x):
        return self.live(self.frozen(x))


def unfreeze(rank, num_ranks, seed):
    """Either the error that names the parameter, or the error of its gradient."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(Frozen().double())
    torch.manual_seed(seed)
    alone = Frozen().double()
    xs = [torch.randn(3, 4, generator=generator(seed, r), dtype=torch.float64) for r in range(num_ranks)]
    squares(model(xs[rank])).backward()
    model.zero_grad()
    for net in (model.module, alone):
        net.frozen.requires_grad_(requires_grad=True)
    try:
        squares(model(xs[rank])).backward()
    except RuntimeError as error:
        return "frozen.weight" in str(error)
    for x in xs:
        (squares(alone(x)) / num_ranks).backward()
    pairs = zip(model.module.parameters(), alone.parameters(), strict=True)
    return max((p.grad - q.grad).abs().max().item() for p, q in pairs) < TOLERANCE


def test_unfreezing_after_wrapping():
    """A parameter unfrozen after wrapping is reduced, or refused by name; never silently local."""
    assert pool(2).run(unfreeze, 9) == [True, True]


def low_precision_range(rank, _num_ranks):
    """Mean of fp16 gradients whose sum overflows."""
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False).half())
    (model.module.weight.sum() * 0 + model(torch.full((1, 1), 40000.0, dtype=torch.float16)).sum()).backward()
    return model.module.weight.grad.item(), rank


def test_fp16_mean_does_not_overflow_where_the_gradients_do_not():
    """40000 on both ranks averages to 40000 in fp16, although the sum is beyond its range."""
    assert [value for value, _ in pool(2).run(low_precision_range)] == [40000.0, 40000.0]
