"""Parameters that some ranks, or all, leave unused: zeros for whoever did not, untouched where nobody did."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn

from harness.models import digest, generator, random_batch, squares
from harness.ranks import pool
from paceline import DistributedDataParallel

pytestmark = pytest.mark.processes

OPTIONS = [{}, {"find_unused_parameters": True}, {"find_unused_parameters": True, "bucket_cap_mb": 0.0001}]


class Choice(nn.Module):
    """Several branches of which a forward uses those it is told to."""

    def __init__(self, num_branches=3):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 2) for _ in range(num_branches))

    def forward(self, x, used):
        hidden = torch.tanh(self.stem(x))
        return sum(self.branches[i](hidden) for i in used)


def build(seed, options):
    torch.manual_seed(seed)
    return DistributedDataParallel(Choice(), **options)


batch = partial(random_batch, shape=(3, 4))


def globally_unused(rank, _num_ranks, seed, options):
    """What an unused branch holds after a step: from None, and from a value that differs per rank."""
    model = build(seed, options)
    out = []
    model(batch(seed, rank, 0), [0, 1]).sum().backward()
    out.append(model.module.branches[2].weight.grad is None)
    old = torch.full_like(model.module.branches[2].weight, rank + 0.1)
    model.module.branches[2].weight.grad = old.clone()
    model(batch(seed, rank, 1), [0, 1]).sum().backward()
    out.append(torch.equal(model.module.branches[2].weight.grad, old))
    model.zero_grad(set_to_none=True)
    model(batch(seed, rank, 2), [2]).sum().backward()
    out.append(model.module.branches[0].weight.grad is None)
    out.append(model.module.branches[2].weight.grad.abs().sum().item() > 0)
    return out


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "default")
def test_globally_unused_parameters_keep_their_gradient(options):
    """None stays None and an old value stays, bit by bit, even if it differs between ranks."""
    assert pool(2).run(globally_unused, 1, options) == [[True] * 4] * 2


def momentum_of_unused(rank, _num_ranks, seed, options):
    """Whether a parameter that nobody used stood still although it has momentum and weight decay."""
    model = build(seed, options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(seed, rank, step), [0, 1, 2]).sum().backward()
        optimizer.step()
    before = model.module.branches[1].weight.detach().clone()
    optimizer.zero_grad()
    model(batch(seed, rank, 9), [0, 2]).sum().backward()
    optimizer.step()
    return torch.equal(before, model.module.branches[1].weight)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "default")
def test_optimizer_skips_what_nobody_used(options):
    """After zero_grad to None a globally unused parameter is not moved by momentum or weight decay."""
    assert pool(2).run(momentum_of_unused, 2, options) == [True, True]


def random_branches(rank, num_ranks, seed, options, num_steps):
    """Whether any gradient is not the mean, with branches drawn anew on every rank in every step."""
    model = build(seed, options)
    torch.manual_seed(seed)
    alone = Choice()
    wrong = []
    for step in range(num_steps):
        model.zero_grad(set_to_none=step % 2 == 0)
        alone.zero_grad(set_to_none=step % 2 == 0)
        for r in range(num_ranks):
            used = [i for i in range(3) if torch.rand((), generator=generator(seed, step, r, i)) < 0.6]
            used = used or [step % 3]
            if r == rank:
                model(batch(seed, step, r), used).sum().backward()
            (alone(batch(seed, step, r), used).sum() / num_ranks).backward()
        for (name, p), q in zip(model.module.named_parameters(), alone.parameters(), strict=True):
            if (p.grad is None) != (q.grad is None):
                wrong.append((step, name, "None"))
            elif q.grad is not None and not torch.allclose(p.grad, q.grad, atol=1e-6):
                wrong.append((step, name, "value"))
    return wrong


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "default")
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_random_branches_on_every_rank(num_ranks, options):
    """Twenty-four steps with branches at random, different on every rank: always the mean, None where nobody."""
    assert pool(num_ranks).run(random_branches, 3, options, 24) == [[]] * num_ranks


def in_the_last_iteration(rank, _num_ranks, seed):
    model = build(seed, {})
    for step in range(3):
        model.zero_grad()
        used = [0, 1, 2] if step < 2 or rank == 0 else [0, 1]
        model(batch(seed, step, rank), used).sum().backward()
    return [p.grad.tolist() for p in model.parameters()]


def test_unused_in_the_last_iteration_is_reduced_in_that_backward():
    """A parameter that one rank leaves unused in the very last step is right when that backward returns."""
    first, second = pool(2).run(in_the_last_iteration, 4)
    assert first == second


def caught_warnings(rank, _num_ranks, seed, options, everywhere):
    model = build(seed, options)
    texts = []
    for step in range(4):
        used = [0, 1] if everywhere or rank == 0 else [0, 1, 2]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(batch(seed, step, rank), used).sum().backward()
        texts += [f"{w.category.__name__}: {w.message}" for w in caught]
    return texts


@pytest.mark.parametrize("everywhere", [True, False], ids=["on every rank", "on one rank"])
def test_unused_without_the_option_warns_once_with_names(everywhere):
    """find_unused_parameters=False: one UserWarning names the parameters; the gradients are right anyway."""
    results = pool(2).run(caught_warnings, 5, {}, everywhere)
    for texts in results[: 2 if everywhere else 1]:
        assert len(texts) == 1, texts
        assert texts[0].startswith("UserWarning")
        assert "branches.2.weight" in texts[0]


def test_unused_with_the_option_is_silent():
    """find_unused_parameters=True and something is unused: nothing to warn about."""
    assert pool(2).run(caught_warnings, 6, {"find_unused_parameters": True}, True) == [[], []]


class Opaque:
    """An output that no one can look into."""

    def __init__(self, value):
        self.value = value


class OpaqueOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(4, 2)
        self.spare = nn.Linear(4, 2)

    def forward(self, x):
        return Opaque(self.used(x))


def opaque(rank, num_ranks, seed):
    torch.manual_seed(seed)
    model = DistributedDataParallel(OpaqueOutput(), find_unused_parameters=True)
    xs = [torch.randn(3, 4, generator=generator(seed, r)) for r in range(num_ranks)]
    for _ in range(2):
        model.zero_grad()
        model(xs[rank]).value.sum().backward()
    mean = sum(x.sum(0) for x in xs) / num_ranks
    return torch.allclose(model.module.used.weight.grad[0], mean), model.module.spare.weight.grad is None


def test_outputs_that_cannot_be_looked_into():
    """An opaque output object: used parameters are still found, where torch takes all for unused."""
    assert pool(2).run(opaque, 7) == [(True, True)] * 2


def local_used_map(rank, _num_ranks, seed):
    model = build(seed, {"find_unused_parameters": True})
    model(batch(seed, rank), [rank]).sum().backward()
    used = model.reducer._get_local_used_map()
    return str(used.dtype), [bool(x) for x in used][:2], [bool(x) for x in used][-2:]


def test_local_used_map():
    """`reducer._get_local_used_map()`: one int32 a parameter, zero for those that nobody used."""
    assert pool(2).run(local_used_map, 8) == [("torch.int32", [True, True], [False, False])] * 2


class Routed(nn.Module):
    """One expert, to which not every batch is given; returns its input, too."""

    def __init__(self):
        super().__init__()
        self.expert = nn.Linear(4, 4)

    def forward(self, x, is_given):
        return (self.expert(x) if is_given else 2 * x), x


def routed_batch(seed, step, rank):
    return batch(seed, step, rank).requires_grad_(), (step + rank) % 3 != 0


def routed_mean(model, seed, steps, num_ranks):
    """The gradients of one process for the mean over all ranks of these steps' losses, summed over the steps."""
    alone = Routed()
    alone.load_state_dict(model.module.state_dict())
    for step in steps:
        for rank in range(num_ranks):
            x, is_given = routed_batch(seed, step, rank)
            if is_given:
                (squares(alone(x, is_given)[0]) / num_ranks).backward()
    return [p.grad for p in alone.parameters()]


def routed(rank, num_ranks, seed, options):
    """The largest error of a gradient over several steps, of one backward, of two, and of windows."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(Routed(), **options)
    errors = []

    def compare(steps, factor=1.0):
        pairs = zip(model.parameters(), routed_mean(model, seed, steps, num_ranks), strict=True)
        errors.append(max((factor * p.grad - expected).abs().max().item() for p, expected in pairs))
        model.zero_grad()

    for step in range(5):
        squares(model(*routed_batch(seed, step, rank))[0]).backward()
        compare([step])
    for step in range(3):
        with model.no_sync():
            squares(model(*routed_batch(seed, step, rank))[0]).backward()
        squares(model(*routed_batch(seed, step + 1, rank))[0]).backward()
        compare([step, step + 1])
        with model.accumulate([routed_batch(seed, each, rank) for each in (step, step + 1)]) as window:
            for x, is_given in window:
                squares(model(x, is_given)[0]).backward()
        compare([step, step + 1], factor=2.0)
    return max(errors), digest(list(model.parameters()))


@pytest.mark.parametrize(
    "options", [*OPTIONS, {"skip_all_reduce_unused_params": True}, {"overlap_forward": "always"}], ids=str
)
@pytest.mark.filterwarnings("ignore")
def test_a_rank_whose_batch_reaches_no_parameter_counts_as_zero(options):
    """In that step, also without an unused parameter on any other rank, under `no_sync` and in windows."""
    first, second = pool(2).run(routed, 5, options)
    assert max(first[0], second[0]) < 1e-6
    assert first[1] == second[1]


def no_backwards(rank, _num_ranks, seed):
    """Rank 0 alone runs what is no backward of the module: if any of these synchronized, it would wait for rank 1."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(Routed())
    if rank == 0:
        model.eval()  # a forward in training mode would count as one without a backward
        x, _ = routed_batch(seed, 0, 0)
        torch.autograd.grad(model(x, False)[0].sum(), x)
        model(x, False)[0].sum().backward(inputs=[x])
        model(2 * x, True)[1].sum().backward()
        model.requires_grad_(False)
        model(x, True)[0].sum().backward()
        model.requires_grad_(True)
        model.train()
    squares(model(*routed_batch(seed, 1, rank))[0]).backward()
    return digest([p.grad for p in model.parameters()])


def test_what_is_no_backward_of_the_module_does_not_synchronize():
    """Gradients of an input, a graph that an input brought along, and a frozen module, as while a generator trains."""
    first, second = pool(2).run(no_backwards, 6)
    assert first == second
