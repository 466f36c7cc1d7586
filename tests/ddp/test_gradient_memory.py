"""Gradients live in their bucket: views into a few flat buffers, with the layout of their parameter."""

import pytest
import torch
from torch import nn

from harness.models import Mlp, conv_net, generator, squares
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


def survives_the_next_step(rank, _num_ranks, seed):
    """Whether gradients that the user kept (cloned) and gradients taken away behave."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(nn.Linear(4, 2))
    model(torch.randn(3, 4, generator=generator(seed, 0, rank))).sum().backward()
    kept = [p.grad for p in model.parameters()]
    values = [g.clone() for g in kept]
    for p in model.parameters():
        p.grad = None
    with torch.no_grad():
        model(torch.randn(3, 4, generator=generator(seed, 1, rank)))
    return all(torch.equal(a, b) for a, b in zip(kept, values, strict=True))


def test_a_gradient_kept_by_the_user_is_not_overwritten_before_the_next_backward():
    """Setting `.grad` to None and a forward leave the memory alone."""
    assert pool(2).run(survives_the_next_step, 4) == [True, True]


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
