"""Whatever the order of forwards and backwards: the gradients are the mean over ranks.

A scenario is a function that drives a model. It runs once on the wrapped model, with this rank's data, and once
per rank on a bare copy with that rank's data. Since gradients accumulate linearly, the wrapped model must end
with the mean of the copies' gradients; a parameter that no copy used must keep what it had.
"""

import contextlib
import threading
import warnings
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from harness.models import Branches, random_batch
from harness.ranks import pool
from paceline import DistributedDataParallel

pytestmark = pytest.mark.processes

NUM_ROUNDS = 3
TOLERANCE = 1e-12
WIDE = 1400  # weights of more than 32 KiB in float64: each is copied by itself, while backward runs


batch = partial(random_batch, shape=(5, 4), dtype=torch.float64)


def loss_of(outputs):
    return sum((output**2).mean() for output in outputs if output is not None)


def no_sync(model):
    return model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext()


def bare(model):
    return model.module if hasattr(model, "no_sync") else model


SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


@scenario
def plain(model, rank, seed):
    loss_of(model(batch(seed, rank))).backward()


@scenario
def parameter_never_used(model, rank, seed):
    loss_of(model(batch(seed, rank), spare=False)).backward()


@scenario
def second_backward_of_a_retained_graph(model, rank, seed):
    loss = loss_of(model(batch(seed, rank)))
    loss.backward(retain_graph=True)
    loss.backward()


@scenario
def third_backward_of_a_retained_graph(model, rank, seed):
    loss = loss_of(model(batch(seed, rank)))
    for last in (False, False, True):
        (loss * (1 + last)).backward(retain_graph=not last)


@scenario
def two_forwards_then_two_backwards(model, rank, seed):
    losses = [loss_of(model(batch(seed, rank, i))) for i in range(2)]
    for loss in losses:
        loss.backward()


@scenario
def two_forwards_then_two_backwards_in_reverse(model, rank, seed):
    losses = [loss_of(model(batch(seed, rank, i))) for i in range(2)]
    for loss in reversed(losses):
        loss.backward()


@scenario
def three_forwards_then_one_backward(model, rank, seed):
    sum(loss_of(model(batch(seed, rank, i))) for i in range(3)).backward()


@scenario
def a_backward_for_each_of_two_overlapping_outputs(model, rank, seed):
    left, right = model(batch(seed, rank))
    (left**2).mean().backward(retain_graph=True)
    (right**2).mean().backward()


@scenario
def a_backward_for_each_of_two_disjoint_outputs(model, rank, seed):
    left, right = model(batch(seed, rank))
    torch.autograd.backward((left**2).mean(), inputs=list(bare(model).left.parameters()), retain_graph=True)
    torch.autograd.backward((right**2).mean(), inputs=list(bare(model).right.parameters()))


@scenario
def backward_into_chosen_inputs(model, rank, seed):
    loss_of(model(batch(seed, rank))).backward(inputs=[bare(model).left.weight, bare(model).trunk.bias])


@scenario
def backward_of_a_list_of_losses(model, rank, seed):
    left, right = model(batch(seed, rank))
    torch.autograd.backward([(left**2).mean(), right], [None, torch.ones_like(right)])


@scenario
def accumulation_with_no_sync(model, rank, seed):
    with no_sync(model):
        for i in range(3):
            loss_of(model(batch(seed, rank, i))).backward()
    loss_of(model(batch(seed, rank, 3))).backward()


@scenario
def no_sync_around_the_backward_only(model, rank, seed):
    loss = loss_of(model(batch(seed, rank, 0)))
    with no_sync(model):
        loss.backward()
    loss_of(model(batch(seed, rank, 1))).backward()


@scenario
def forward_in_no_sync_and_backward_outside(model, rank, seed):
    with no_sync(model):
        loss = loss_of(model(batch(seed, rank)))
    loss.backward()


@scenario
def other_branch_in_the_no_sync_step(model, rank, seed):
    with no_sync(model):
        loss_of(model(batch(seed, rank, 0), left=True, right=False)).backward()
    loss_of(model(batch(seed, rank, 1), left=False, right=True)).backward()


@scenario
def branch_used_on_rank_0_only(model, rank, seed):
    loss_of(model(batch(seed, rank), left=rank == 0)).backward()


@scenario
def each_rank_uses_another_branch(model, rank, seed):
    loss_of(model(batch(seed, rank), left=rank % 2 == 0, right=rank % 2 == 1)).backward()


@scenario
def branch_used_nowhere(model, rank, seed):
    loss_of(model(batch(seed, rank), left=False)).backward()


@scenario
def output_left_out_of_the_loss(model, rank, seed):
    left, _right = model(batch(seed, rank))
    (left**2).mean().backward()


@scenario
def output_left_out_of_the_loss_on_one_rank(model, rank, seed):
    left, right = model(batch(seed, rank))
    ((left**2).mean() if rank else (left**2).mean() + right.sum()).backward()


@scenario
def branch_unused_in_a_second_backward(model, rank, seed):
    loss_of(model(batch(seed, rank, 0))).backward()
    loss_of(model(batch(seed, rank, 1), right=rank != 0)).backward()


@scenario
def accumulation_without_no_sync(model, rank, seed):
    for i in range(3):
        loss_of(model(batch(seed, rank, i))).backward()


@scenario
def zeroed_between(model, rank, seed):
    loss_of(model(batch(seed, rank, 0))).backward()
    model.zero_grad(set_to_none=False)
    loss_of(model(batch(seed, rank, 1))).backward()


@scenario
def zeroed_to_none_between_forward_and_backward(model, rank, seed):
    loss_of(model(batch(seed, rank, 0))).backward()
    loss = loss_of(model(batch(seed, rank, 1)))
    model.zero_grad(set_to_none=True)
    loss.backward()


@scenario
def gradients_replaced_by_the_user(model, rank, seed):
    loss_of(model(batch(seed, rank, 0))).backward()
    for p in bare(model).parameters():
        if p.grad is not None:
            p.grad = p.grad.clone() * 2
    loss_of(model(batch(seed, rank, 1))).backward()


@scenario
def gradients_set_by_the_user(model, rank, seed):
    for p in bare(model).trunk.parameters():
        p.grad = torch.full_like(p, 0.5)
    loss_of(model(batch(seed, rank))).backward()


@scenario
def gradients_scaled_in_place(model, rank, seed):
    loss_of(model(batch(seed, rank, 0))).backward()
    with torch.no_grad():
        torch._foreach_mul_([p.grad for p in bare(model).parameters() if p.grad is not None], 3.0)
    loss_of(model(batch(seed, rank, 1))).backward()


@scenario
def parameter_used_outside_forward(model, rank, seed):
    outputs = model(batch(seed, rank))
    (loss_of(outputs) + sum((p**2).sum() for p in bare(model).parameters() if p.requires_grad)).backward()


@scenario
def unused_in_forward_but_used_outside(model, rank, seed):
    (loss_of(model(batch(seed, rank), spare=False)) + (bare(model).spare ** 2).sum() * (rank + 1)).backward()


@scenario
def eval_and_no_grad_forwards_between(model, rank, seed):
    loss = loss_of(model(batch(seed, rank, 0)))
    model.eval()
    with torch.no_grad():
        model(batch(seed, rank, 1))
    model.train()
    loss.backward()
    with torch.no_grad():
        model(batch(seed, rank, 2))


@scenario
def a_forward_whose_output_is_dropped(model, rank, seed):
    model(batch(seed, rank, 0))
    loss_of(model(batch(seed, rank, 1))).backward()


@scenario
def gradient_of_eval_mode(model, rank, seed):
    model.eval()
    loss_of(model(batch(seed, rank))).backward()
    model.train()


@scenario
def autograd_grad_in_between(model, rank, seed):
    outputs = model(batch(seed, rank))
    loss = loss_of(outputs)
    torch.autograd.grad(loss, list(bare(model).left.parameters()), retain_graph=True)
    loss.backward()


@scenario
def gradient_penalty(model, rank, seed):
    x = batch(seed, rank).requires_grad_()
    loss = loss_of(model(x))
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + (slope**2).sum()).backward()


@scenario
def create_graph(model, rank, seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss_of(model(batch(seed, rank))).backward(create_graph=True)
    for p in bare(model).parameters():
        if p.grad is not None:
            p.grad = p.grad.detach()


@scenario
def backward_in_another_thread(model, rank, seed):
    loss = loss_of(model(batch(seed, rank)))
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


@scenario
def forward_in_another_thread(model, rank, seed):
    losses = []
    thread = threading.Thread(target=lambda: losses.append(loss_of(model(batch(seed, rank)))))
    thread.start()
    thread.join()
    losses[0].backward()


@scenario
def checkpointed_reentrant(model, rank, seed):
    x = batch(seed, rank).requires_grad_()
    loss_of(checkpoint(model, x, use_reentrant=True)).backward()


@scenario
def checkpointed(model, rank, seed):
    loss_of(checkpoint(model, batch(seed, rank), use_reentrant=False)).backward()


@scenario
def hooks_that_change_gradients(model, rank, seed):
    handles = [p.register_hook(lambda grad: grad * 2) for p in bare(model).left.parameters()]
    loss_of(model(batch(seed, rank))).backward()
    for handle in handles:
        handle.remove()


@scenario
def frozen_after_wrapping(model, rank, seed):
    bare(model).right.requires_grad_(requires_grad=False)
    loss_of(model(batch(seed, rank))).backward()
    bare(model).right.requires_grad_(requires_grad=True)


@scenario
def unfrozen_after_wrapping(model, rank, seed):
    bare(model).frozen.requires_grad_(requires_grad=True)
    loss_of(model(batch(seed, rank))).backward()


@scenario
def unfrozen_then_frozen_again(model, rank, seed):
    bare(model).frozen.requires_grad_(requires_grad=True)
    loss_of(model(batch(seed, rank, 0))).backward()
    bare(model).frozen.requires_grad_(requires_grad=False)
    loss_of(model(batch(seed, rank, 1))).backward()


@scenario
def storage_replaced(model, rank, seed):
    for p in bare(model).parameters():
        p.data = p.data.clone()
    loss_of(model(batch(seed, rank))).backward()


CHANGES_THE_GRAPH = {
    "a_backward_for_each_of_two_disjoint_outputs",
    "backward_into_chosen_inputs",
    "other_branch_in_the_no_sync_step",
    "branch_unused_in_a_second_backward",
    "frozen_after_wrapping",
    "unfrozen_after_wrapping",
    "unfrozen_then_frozen_again",
    "a_backward_for_each_of_two_overlapping_outputs",
    "autograd_grad_in_between",
    "gradient_penalty",
}


def drive(rank, num_ranks, name, seed, options, width=6):
    """What is wrong: round, parameter, and how its gradient differs from the mean of the bare copies'."""
    warnings.simplefilter("ignore")

    def make():
        torch.manual_seed(seed)
        return Branches(width).double()

    model = DistributedDataParallel(make(), **options)
    copies = [make() for _ in range(num_ranks)]
    names = [key for key, _ in model.module.named_parameters()]
    wrong = []
    for round_ in range(NUM_ROUNDS):
        SCENARIOS[name](model, rank, seed * 100 + round_)
        for r, one in enumerate(copies):
            SCENARIOS[name](one, r, seed * 100 + round_)
        everywhere = zip(names, model.module.parameters(), *(one.parameters() for one in copies), strict=True)
        for key, parameter, *others in everywhere:
            present = [one.grad for one in others if one.grad is not None]
            if (parameter.grad is None) != (not present):
                wrong.append((round_, key, "is None" if parameter.grad is None else "is not None"))
            elif present:
                difference = (parameter.grad - sum(present) / num_ranks).abs().max().item()
                if not difference <= TOLERANCE:
                    wrong.append((round_, key, f"off by {difference:.3g}"))
        for one in [model, *copies]:
            one.zero_grad(set_to_none=round_ % 2 == 0)
    return wrong


def drive_all(rank, num_ranks, names, seed, options, width=6):
    """What is wrong, by scenario."""
    found = {}
    for name in names:
        try:
            found[name] = drive(rank, num_ranks, name, seed, options, width)
        except Exception as error:
            raise AssertionError(f"scenario {name}, options {options}") from error
    return {name: wrong for name, wrong in found.items() if wrong}


def every_scenario(num_ranks, seed, options, width=6, without=()):
    """Runs them one after another on the same ranks: launching each by itself would take longer than all of them."""
    names = sorted(SCENARIOS.keys() - without)
    assert pool(num_ranks).run(drive_all, names, seed, options, width, deadline_s=110.0) == [{}] * num_ranks


def test_gradients_are_the_mean_over_ranks():
    """Default options, three rounds: mean of the bare copies' gradients, None where none has one."""
    every_scenario(2, 1, {})


def test_options_do_not_change_the_mean():
    """The same for every option that says how to reduce, over three ranks, with a bucket for each parameter."""
    every_scenario(3, 2, {"find_unused_parameters": True, "bucket_cap_mb": 0.0001})


def test_options_that_are_accepted_change_nothing():
    """Gradients are views of buckets, and copied together, whatever is said."""
    for options in ({"gradient_as_bucket_view": True}, {"batched_grad_copy": True}):
        assert pool(2).run(drive, "accumulation_with_no_sync", 2, options) == [[], []]


def test_large_gradients_are_the_mean():
    """The same for gradients that are large, which take another way into their bucket."""
    every_scenario(2, 5, {}, WIDE)


def test_static_graph_gives_the_mean():
    """The same under static_graph, for scenarios whose graph is the same in every backward round."""
    every_scenario(2, 3, {"static_graph": True}, without=CHANGES_THE_GRAPH)


def test_one_rank_alone():
    """World size 1: the scenarios hold, with nobody to talk to."""
    every_scenario(1, 4, {})
