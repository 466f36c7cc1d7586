"""What goes into and comes out of forward: any nesting, any container, any size."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from harness.models import generator
from harness.ranks import pool
from paceline import DistributedDataParallel

pytestmark = pytest.mark.processes


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Record:
    logits: torch.Tensor
    note: str
    loss: torch.Tensor | None = None


class Custom:
    """An input that no container rule covers."""

    def __init__(self, value):
        self.value = value


class Shapes(nn.Module):
    """Returns its result in the container that it is asked for."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.second = nn.Linear(4, 3)

    def forward(self, x, kind):
        a, b = self.linear(x), self.second(x)
        return {
            "tuple": lambda: (a, b),
            "list": lambda: [a, [b]],
            "dict": lambda: {"a": a, "deep": {"b": (b, 1, None, "text")}},
            "namedtuple": lambda: Pair(a, b),
            "dataclass": lambda: Record(a, "note", b),
            "mixed": lambda: [Record(a, "n"), {"p": Pair(b, None)}],
            "opaque": lambda: Custom((a, b)),
            "view": lambda: (a[:, :2], b.t()),
            "zero size": lambda: (a[:0], b[:, :0], a, b),
            "input itself": lambda: (x, a, b),
            "detached": lambda: (a.detach(), a, b),
            "same twice": lambda: (a, a, b),
        }[kind]()


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors_in(v)]
    if isinstance(value, list | tuple):
        return [t for v in value for t in tensors_in(v)]
    if isinstance(value, Record):
        return tensors_in([value.logits, value.loss])
    if isinstance(value, Custom):
        return tensors_in(value.value)
    return []


def outputs(rank, num_ranks, kind, seed, options):
    """Type of the output, and the largest error of any gradient over three steps."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(Shapes().double(), **options)
    torch.manual_seed(seed)
    alone = Shapes().double()
    worst = 0.0
    for step in range(3):
        model.zero_grad()
        alone.zero_grad()
        for r in range(num_ranks):
            x = torch.randn(5, 4, generator=generator(seed, step, r), dtype=torch.float64)
            if r == rank:
                output = model(x, kind)
                sum((t**2).sum() for t in tensors_in(output) if t.requires_grad).backward()
            (sum((t**2).sum() for t in tensors_in(alone(x, kind)) if t.requires_grad) / num_ranks).backward()
        pairs = zip(model.module.parameters(), alone.parameters(), strict=True)
        worst = max([worst, *((p.grad - q.grad).abs().max().item() for p, q in pairs)])
    return type(output).__name__, worst


KINDS = {
    "tuple": "tuple",
    "list": "list",
    "dict": "dict",
    "namedtuple": "Pair",
    "dataclass": "Record",
    "mixed": "list",
    "opaque": "Custom",
    "view": "tuple",
    "zero size": "tuple",
    "input itself": "tuple",
    "detached": "tuple",
    "same twice": "tuple",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [{}, {"find_unused_parameters": True}, {"static_graph": True}],
    ids=lambda options: "+".join(options) or "default",
)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_outputs(kind, options):
    """The container comes back as it is, and the gradients through it are the mean."""
    for name, worst in pool(2).run(outputs, kind, 1, options):
        assert name == KINDS[kind]
        assert worst < 1e-12


class Recording(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.seen = None

    def forward(self, *args, **kwargs):
        self.seen = (args, kwargs)
        x = next(iter(tensors_in([*args, kwargs])), None)
        return self.linear(x if x is not None else args[0].data)


def inputs(rank, _num_ranks, seed):
    """Whether every input arrived as the very object, or an equal one, that was passed."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(Recording())
    x = torch.randn(2, 4, generator=generator(seed, rank))
    packed = pack_padded_sequence(x[None], torch.tensor([2]), batch_first=True)
    custom = Custom(7)
    results = []
    for args, kwargs in [
        ((x, 1, "text", None), {}),
        ((x,), {"flag": True, "more": [x, {"k": (x, 2)}]}),
        ((Pair(x, 1),), {"record": Record(x, "note")}),
        ((packed,), {"custom": custom}),
        ((), {"x": x}),
    ]:
        model(*args, **kwargs).sum().backward()
        seen_args, seen_kwargs = model.module.seen
        results.append([type(a) for a in seen_args] == [type(a) for a in args])
        results.append(set(seen_kwargs) == set(kwargs))
        if "custom" in kwargs:
            results.append(seen_kwargs["custom"] is custom)
            results.append(isinstance(seen_args[0], PackedSequence))
    return results


def test_inputs_arrive_as_they_were_passed():
    """Positional, keyword, nested, namedtuple, dataclass, PackedSequence and foreign objects."""
    for results in pool(2).run(inputs, 2):
        assert all(results)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.out = nn.Linear(4, 2)

    def forward(self, packed):
        hidden, _ = self.lstm(packed)
        padded, _ = pad_packed_sequence(hidden, batch_first=True)
        return hidden, self.out(padded)


def packed_sequences(rank, num_ranks, seed):
    torch.manual_seed(seed)
    model = DistributedDataParallel(Packed().double())
    torch.manual_seed(seed)
    alone = Packed().double()

    def loss(net, r):
        x = torch.randn(3, 5, 3, generator=generator(seed, r), dtype=torch.float64)
        lengths = torch.tensor([5, 3, 2 + r % 2])
        hidden, out = net(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return hidden.data.sum() + (out**2).mean()

    loss(model, rank).backward()
    for r in range(num_ranks):
        (loss(alone, r) / num_ranks).backward()
    pairs = zip(model.module.parameters(), alone.parameters(), strict=True)
    return max((p.grad - q.grad).abs().max().item() for p, q in pairs)


def test_packed_sequences_in_and_out():
    """An LSTM over PackedSequence inputs that returns one: gradients are the mean."""
    assert max(pool(2).run(packed_sequences, 3)) < 1e-12


class ZeroSize(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x)


def zero_size(rank, num_ranks, seed, empty_on):
    """Error of the mean where some ranks have an empty batch."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(ZeroSize())
    sizes = [0 if r in empty_on else 3 for r in range(num_ranks)]
    xs = [torch.randn(n, 4, generator=generator(seed, r)) for r, n in enumerate(sizes)]
    for _ in range(3):
        model.zero_grad()
        model(xs[rank]).sum().backward()
    return (model.module.linear.weight.grad[0] - sum(x.sum(0) for x in xs) / num_ranks).abs().max().item()


@pytest.mark.parametrize("empty_on", [(0,), (1,), (0, 1)])
def test_empty_batches(empty_on):
    """A rank whose batch is empty contributes zeros, and nobody waits for it."""
    assert max(pool(2).run(zero_size, 4, empty_on)) < 1e-6


def in_place_on_output(rank, _num_ranks, seed):
    torch.manual_seed(seed)
    model = DistributedDataParallel(nn.Linear(4, 3), find_unused_parameters=True)
    output = model(torch.randn(3, 4, generator=generator(seed, rank)))
    output += 1.0
    output.mul_(2.0)
    output.sum().backward()
    return model.module.bias.grad.tolist()


@pytest.mark.filterwarnings("ignore")
def test_outputs_can_be_modified_in_place():
    """An in-place operation on the output works, which torch's sink refuses without a clone (#61982)."""
    assert pool(2).run(in_place_on_output, 5) == [[6.0] * 3] * 2


def no_gradient_output(rank, _num_ranks, seed):
    """A forward whose output needs no gradient, then an ordinary one."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(nn.Linear(4, 3))
    with torch.inference_mode():
        model(torch.randn(3, 4))
    with torch.no_grad():
        assert not model(torch.randn(3, 4)).requires_grad
    model(torch.randn(3, 4, generator=generator(seed, rank))).sum().backward()
    return model.module.weight.grad.tolist()


def test_inference_mode_and_no_grad():
    """Forwards under inference_mode and no_grad leave training alone."""
    first, second = pool(2).run(no_gradient_output, 6)
    assert first == second
