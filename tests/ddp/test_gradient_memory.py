"""Gradients live in their bucket: views into a few flat buffers, with the layout of their parameter."""

import pytest
import torch
from torch import nn

from harness.models import Mlp, conv_net, generator, random_batch, squares
from harness.ranks import pool
from paceline import DistributedDataParallel

pytestmark = pytest.mark.processes


def storages(model):
    return {p.grad.untyped_storage().data_ptr() for p in model.parameters()}


def after_steps(rank, _num_ranks, seed, set_to_none, options):
    """Number of storages behind the gradients, and whether gradients alias each other's storage, per step."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(Mlp(), **options)
    counts, pointers = [], []
    for step in range(4):
        model.zero_grad(set_to_none=set_to_none)
        squares(model(torch.randn(3, 8, generator=generator(seed, step, rank)))).backward()
        counts.append(len(storages(model)))
        pointers.append([p.grad.data_ptr() for p in model.parameters()])
    return counts, pointers[-1] == pointers[-2]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}], ids=str
)
def test_gradients_share_a_few_flat_buffers(set_to_none, options):
    """All gradients of a small model lie in one storage after every step, and in the same places."""
    for counts, stable in pool(2).run(after_steps, 1, set_to_none, options):
        assert counts == [1] * 4
        assert stable


def layouts(rank, _num_ranks, seed):
    torch.manual_seed(seed)
    model = DistributedDataParallel(conv_net().to(memory_format=torch.channels_last))
    results = []
    for step in range(3):
        model.zero_grad()
        x = torch.randn(4, 3, 8, 8, generator=generator(seed, step, rank)).to(
            memory_format=torch.channels_last
        )
        squares(model(x)).backward()
        results.append([p.grad.stride() == p.stride() for p in model.parameters()])
    return results


def test_gradients_have_the_strides_of_their_parameters():
    """channels_last parameters have channels_last gradients, in every step."""
    for results in pool(2).run(layouts, 2):
        assert all(all(step) for step in results)


def detach_in_place(rank, num_ranks, seed):
    """Largest error after detach_() on gradients and one more accumulating backward."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(nn.Linear(4, 1))
    xs = [torch.randn(3, 4, generator=generator(seed, r)) for r in range(num_ranks)]
    model(xs[rank]).sum().backward()
    for p in model.parameters():
        p.grad.detach_()
        p.grad.requires_grad_(requires_grad=False)
    model(xs[rank]).sum().backward()
    return (model.module.weight.grad - 2 * sum(x.sum(0) for x in xs) / num_ranks).abs().max().item()


def test_gradients_can_be_detached_in_place():
    """`p.grad.detach_()` works, also where torch's bucket views refuse it."""
    assert max(pool(2).run(detach_in_place, 3)) < 1e-6


class Kept(nn.Module):
    """Small and large gradients, and two tasks of which each leaves a layer out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.body = nn.Sequential(nn.Linear(4, 100), nn.Linear(100, 120), nn.Linear(120, 4))
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])

    def forward(self, x, task):
        return self.heads[task](torch.tanh(self.body(x)))


def gradients(model):
    return [p.grad for p in model.parameters() if p.grad is not None]


def backward(model, rank, step, task=0):
    squares(model(random_batch(rank, step, shape=(3, 4)), task)).backward()


def of_each_task(model, rank):
    kept = []
    for task in (0, 1, 0):
        model.zero_grad()
        backward(model, rank, task, task)
        kept += gradients(model)
    return kept


def a_few(model, rank):
    backward(model, rank, 0)
    kept = gradients(model)[1:4]
    model.zero_grad()
    for step in (1, 2):
        backward(model, rank, step)
    return kept + gradients(model)


def while_one_is_accumulated(model, rank):
    backward(model, rank, 0)
    kept = gradients(model)
    for p in list(model.parameters())[::2]:
        p.grad = None
    backward(model, rank, 1)
    return kept + gradients(model)


def before_a_local_backward(model, rank):
    backward(model, rank, 0)
    kept = gradients(model)
    model.zero_grad()
    with model.no_sync():
        backward(model, rank, 1)
    backward(model, rank, 2)
    return kept + gradients(model)


def given_to_another_parameter(model, rank):
    master = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    backward(model, rank, 0)
    for own, p in zip(master, model.parameters(), strict=True):
        own.grad = p.grad
    model.zero_grad()
    backward(model, rank, 1)
    return [p.grad for p in master if p.grad is not None] + gradients(model)


def put_back(model, rank):
    backward(model, rank, 0)
    kept = gradients(model)
    model.zero_grad()
    backward(model, rank, 1)
    for p, gradient in zip((p for p in model.parameters() if p.grad is not None), kept, strict=True):
        p.grad = gradient
    backward(model, rank, 2)
    return gradients(model)


def in_a_graph(model, rank):
    """The others are changed in place, and then written by another backward."""
    backward(model, rank, 0)
    first, *others = gradients(model)[-2:]
    factor = torch.ones_like(first).requires_grad_()
    product = (factor * first).sum()
    for gradient in others:
        gradient.mul_(2)
    model.zero_grad()
    backward(model, rank, 1)
    product.backward()
    return [first, factor.grad, *gradients(model)]


SCRIPTS = [
    of_each_task,
    a_few,
    while_one_is_accumulated,
    before_a_local_backward,
    given_to_another_parameter,
    put_back,
    in_a_graph,
]


def kept_gradients(rank, _num_ranks, options):
    """Scripts after which gradients differ from those of torch's class."""
    different = []
    for script in SCRIPTS:
        ours = script(DistributedDataParallel(Kept(), find_unused_parameters=True, **options), rank)
        theirs = script(nn.parallel.DistributedDataParallel(Kept(), find_unused_parameters=True), rank)
        pairs = zip(ours, theirs, strict=True)
        if not all(torch.equal(a, b) for a, b in pairs):
            different.append(script.__name__)
    return different


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.01}, {"overlap_forward": "always"}], ids=str)
def test_gradients_that_a_script_keeps_stay(options):
    """As with torch's class, whichever are kept, however long, and whatever is written meanwhile."""
    assert pool(2).run(kept_gradients, options) == [[], []]


def plain_steps(rank, _num_ranks, options):
    """How many other tensors the gradients were after the first step."""
    model = DistributedDataParallel(Kept(), **options)
    seen = []
    for step in range(4):
        model.zero_grad()
        (
            model(random_batch(rank, step, shape=(3, 4)), 0).sum()
            + 0 * sum(map(torch.sum, model.parameters()))
        ).backward()
        seen.append([id(gradient) for gradient in gradients(model)])
    return len(set(map(tuple, seen[1:])))


@pytest.mark.parametrize(
    "options",
    [{}, {"find_unused_parameters": True}, {"overlap_forward": "always"}, {"compression": "powersgd"}],
    ids=str,
)
def test_gradients_that_nobody_keeps_are_not_copied(options):
    """In plain steps each gradient is the same view into its bucket."""
    assert pool(2).run(plain_steps, options) == [1, 1]


def post_accumulate_hooks(rank, num_ranks, seed, width):
    """What a user's post-accumulate hook sees, registered before and after wrapping."""
    torch.manual_seed(seed)
    module = nn.Linear(4, width, bias=False)
    seen = []
    module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    model = DistributedDataParallel(module)
    module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    xs = [torch.randn(3, 4, generator=generator(seed, r)) for r in range(num_ranks)]
    for _ in range(3):
        seen.clear()
        model.zero_grad()
        model(xs[rank]).sum().backward()
    local = all(torch.allclose(gradient[0], xs[rank].sum(0)) for gradient in seen)
    return len(seen), local, torch.allclose(module.weight.grad[0], sum(x.sum(0) for x in xs) / num_ranks)


@pytest.mark.parametrize("width", [2, 4096])
def test_post_accumulate_hooks_of_the_user(width):
    """A user's post-accumulate hook, registered before or after wrapping, sees this rank's gradient in `.grad`."""
    assert pool(2).run(post_accumulate_hooks, 6, width) == [(2, True, True)] * 2


def user_hooks(rank, num_ranks, seed):
    """What tensor hooks and post-accumulate hooks of the user see: this rank's own gradient."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(nn.Linear(4, 1, bias=False))
    x = torch.randn(3, 4, generator=generator(seed, rank))
    seen = []
    model.module.weight.register_hook(lambda g: seen.append(g.clone()))
    model(x).sum().backward()
    return torch.allclose(seen[0][0], x.sum(0)), len(seen) == 1, num_ranks == 2


def test_user_hooks_see_local_gradients():
    """A user's tensor hook fires once, before reduction, with the local gradient."""
    assert pool(2).run(user_hooks, 5) == [(True, True, True)] * 2
