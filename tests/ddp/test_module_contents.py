"""Parameters that are replaced, converted or added after wrapping: refused, and what only looks like that is not."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from harness.models import digest, random_batch, squares
from harness.ranks import pool
from paceline import DistributedDataParallel
from paceline.errors import ConfigurationError

pytestmark = pytest.mark.processes


class LoRA(nn.Module):
    """A frozen layer with a product of two trainable matrices, as PEFT puts it in a layer's place."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class Net(nn.Module):
    """Layers of several kinds, among them tied ones, and a list that may be empty."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(9, 4)
        self.body = nn.Linear(4, 4)
        self.more = nn.ModuleList([nn.Linear(4, 4)])
        self.gain = nn.Parameter(torch.ones(1))
        self.out = nn.Linear(4, 9, bias=False)
        self.out.weight = self.embedding.weight
        self.head = nn.Linear(9, 2)
        self.large = nn.Linear(4000, 4)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.large(torch.ones(4000))
        for layer in (self.body, *self.more):
            x = torch.tanh(layer(x)) * self.gain
        return self.head(self.out(x).to(self.head.weight.dtype))


def tokens(rank, step=0):
    return (random_batch(rank, step, shape=(3, 2)).abs() * 4).long().clamp(max=8)


def assign_state(net):
    net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)


def under_swapping(act):
    def swap(net):
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            act(net)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    return swap


def swap_all(net):
    for parameter in net.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clone()))


def resize(parameter, shape):
    parameter.data = torch.zeros(shape)


def longer(net):
    net.out.weight = net.embedding.weight = nn.Parameter(torch.randn(12, 4))
    net.head = nn.Linear(12, 2)


REPLACED = {
    "another head": lambda net: setattr(net, "head", nn.Linear(9, 2)),
    "another parameter": lambda net: setattr(net.body, "weight", nn.Parameter(torch.randn(4, 4))),
    "a parameter put into the dictionary": lambda net: net.body._parameters.update(
        weight=nn.Parameter(torch.randn(4, 4))
    ),
    "one tensor in place of two": lambda net: setattr(net.out, "weight", nn.Parameter(torch.randn(9, 4))),
    "a copy of a layer": lambda net: setattr(net, "body", copy.deepcopy(net.body)),
    "every layer a copy": lambda net: [setattr(net, n, copy.deepcopy(m)) for n, m in net.named_children()],
    "a layer in a list": lambda net: net.more.__setitem__(0, nn.Linear(4, 4)),
    "weight_norm": lambda net: nn.utils.weight_norm(net.body),
    "weight_norm, as a parametrization": lambda net: parametrizations.weight_norm(net.body),
    "LoRA": lambda net: setattr(net, "body", LoRA(net.body)),
    "a state that is assigned": assign_state,
    "tensors that are swapped": swap_all,
    "one tensor that is swapped": lambda net: torch.utils.swap_tensors(
        net.head.bias, nn.Parameter(torch.zeros(2))
    ),
    "a large tensor that is swapped": lambda net: torch.utils.swap_tensors(
        net.large.weight, nn.Parameter(torch.zeros(4, 4000))
    ),
    "a state that is loaded by swapping": under_swapping(lambda net: net.load_state_dict(net.state_dict())),
}
ADDED = {
    "LoRA without freezing": lambda net: setattr(net, "body", LoRA(net.body).requires_grad_(True)),
    "a layer put into a list": lambda net: net.more.insert(0, nn.Linear(4, 4)),
    "a layer behind the list": lambda net: net.more.append(nn.Linear(4, 4)),
}
CONVERTED = {
    "double": lambda net: net.double(),
    "half": lambda net: net.half(),
    "bfloat16": lambda net: net.bfloat16(),
    "to": lambda net: net.to(torch.float64),
    "one layer": lambda net: net.head.double(),
    "a large layer": lambda net: net.large.double(),
    "by swapping": under_swapping(lambda net: net.double()),
    "a longer embedding": longer,
    "data of more elements": lambda net: resize(net.large.weight, (4, 8000)),
    "a part of the data": lambda net: resize(net.head.bias, 1),
}
ALLOWED = {
    "nothing": nn.Module.train,
    "prune": lambda net: prune.l1_unstructured(net.body, "weight", 0.3),
    "prune for good": lambda net: prune.remove(prune.l1_unstructured(net.body, "weight", 0.3), "weight"),
    "spectral_norm": lambda net: nn.utils.spectral_norm(net.body),
    "spectral norm, as a parametrization": lambda net: parametrizations.spectral_norm(net.body),
    "a layer in another layer": lambda net: setattr(net, "body", nn.Sequential(net.body)),
    "a layer deleted from a list": lambda net: net.more.__delitem__(0),
    "other data of this size": lambda net: setattr(net.gain, "data", torch.full((1,), 2.0)),
    "a module that is not called": lambda net: setattr(net, "average", copy.deepcopy(net)),
    "a frozen layer replaced": lambda net: setattr(net, "head", nn.Linear(9, 2).requires_grad_(False)),
    "other strides": lambda net: net.to(memory_format=torch.channels_last),
}


def step_after(act, rank, trains_before):
    """What a step raises if `act` changed the module before it, and the words of where; else the gradients' bits."""
    model = DistributedDataParallel(Net())
    if trains_before:
        model(tokens(rank)).sum().backward()
        model.zero_grad()
    act(model.module)
    try:
        loss = squares(model(tokens(rank, 1)))
    except ConfigurationError as error:
        return "forward", str(error)
    try:
        loss.backward()
    except ConfigurationError as error:
        return "backward", str(error)
    try:
        model(tokens(rank, 2))
    except ConfigurationError as error:
        return "second forward", str(error)
    return "trained", digest([p.grad for p in model.parameters() if p.grad is not None])


def steps_after(rank, _num_ranks, ways):
    results = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # weight_norm is deprecated; a deleted layer is not used
        for name, act in globals()[ways].items():
            for trains_before in (False, True):
                results[name, trains_before] = step_after(act, rank, trains_before)
    return results


# Nothing has left the module, or it is a small parameter that nobody looks at in every forward.
LATER = {
    "one tensor in place of two": "backward",
    "LoRA": "backward",
    "one tensor that is swapped": "backward",
    "one layer": "backward",
    "a part of the data": "backward",
}
REPLACED_WORDS = "is not a parameter with which the module was wrapped"


def test_a_replaced_parameter_is_refused():
    """Every way to put another parameter in the place of one: the next forward raises and names it."""
    for results in pool(2).run(steps_after, "REPLACED"):
        for way, (where, words) in results.items():
            place = LATER.get(way[0], "forward")
            assert (where, REPLACED_WORDS in words) == (place, True), (way, where, words)
        assert results["another head", True][1].startswith("head.weight ")


def test_an_added_parameter_is_refused_once_it_has_a_gradient():
    """Nothing is missing, but a backward would make a gradient that stays on this rank."""
    for results in pool(2).run(steps_after, "ADDED"):
        for way, (where, words) in results.items():
            assert (where, REPLACED_WORDS in words) == ("backward", True), (way, words)


def test_a_converted_parameter_is_refused():
    """Another type or size: the next forward says from what it was converted to what."""
    for results in pool(2).run(steps_after, "CONVERTED"):
        for way, (where, words) in results.items():
            place = LATER.get(way[0], "forward")
            assert (where, "Convert the module first, then wrap it" in words) == (place, True), (way, where)
        name = "gain was converted from torch.float32[1] to torch.float64[1]"
        assert results["double", True][1].startswith(name)


def test_what_keeps_the_parameters_is_allowed():
    """The same parameters in other places, or others that are never used, train on, equally on all ranks."""
    first, second = pool(2).run(steps_after, "ALLOWED")
    assert first == second
    assert {where for where, _ in first.values()} == {"trained"}


class Hidden(nn.Module):
    """Returns its output in an object that no library looks into."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        output = self.net(x)
        return [lambda: output]


def hidden(rank, _num_ranks):
    """Words of the step behind an added layer, if the wrapper finds no output."""
    model = DistributedDataParallel(Hidden())
    net = model.module.net
    net.body = LoRA(net.body).requires_grad_(True)
    with pytest.raises(ConfigurationError) as caught:
        squares(model(tokens(rank))[0]()).backward()
    return str(caught.value)


def test_an_added_parameter_is_refused_where_outputs_are_hidden():
    """No output says that a backward begins; the first gradient of another parameter does."""
    for words in pool(2).run(hidden):
        assert words.startswith(("net.body.a.weight", "net.body.b.weight")), words
        assert REPLACED_WORDS in words


def wrapped_anew(rank, _num_ranks):
    """The bits of a step after each refused change, with the module wrapped anew as the error says."""
    bits = {}
    for name, act in REPLACED.items():
        net = Net()
        model = DistributedDataParallel(net)
        squares(model(tokens(rank))).backward()
        torch.manual_seed(2)
        act(net)
        net.zero_grad()
        model = DistributedDataParallel(net)
        squares(model(tokens(rank, 1))).backward()
        bits[name] = digest([p.grad for p in net.parameters() if p.requires_grad])
    return bits


@pytest.mark.filterwarnings("ignore")  # weight_norm is deprecated
def test_a_changed_module_trains_if_it_is_wrapped_anew():
    """Every parameter has a gradient, the same on all ranks: also if torch has swapped tensors under their hooks."""
    first, second = pool(2).run(wrapped_anew)
    assert first == second
    assert first.keys() == REPLACED.keys()


def unfrozen_later(rank, _num_ranks):
    """Bits of steps with a frozen layer that was added, and the words once it trains."""
    model = DistributedDataParallel(Net())
    layer = nn.Linear(4, 4).requires_grad_(False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(4))
        layer.bias.zero_()
    model.module.more.append(layer)
    squares(model(tokens(rank))).backward()
    bits = digest([p.grad for p in model.parameters() if p.grad is not None])
    layer.requires_grad_(True)
    with pytest.raises(ConfigurationError) as caught:
        squares(model(tokens(rank))).backward()
    return bits, str(caught.value)


def test_a_frozen_layer_that_was_added_is_refused_once_it_trains():
    """While it is frozen, it changes nothing."""
    first, second = pool(2).run(unfrozen_later)
    assert first == second
    assert first[1].startswith("more.1.weight " + REPLACED_WORDS)


def evaluator(rank, _num_ranks):
    """Bits of an added classifier's gradients and of the model's, where each has a backward of its own."""
    model = DistributedDataParallel(Net())
    model.module.body.requires_grad_(False)
    model.module.evaluator = nn.Linear(2, 1)
    bits = []
    for step in range(3):
        model.zero_grad()
        model.module.body.requires_grad_(step > 0)  # the second step makes another reducer
        output = model(tokens(rank, step))
        squares(model.module.evaluator(output.detach())).backward()
        squares(output).backward()
        bits.append((digest([model.module.evaluator.weight.grad]), digest([model.module.head.weight.grad])))
    return bits


def test_a_part_with_a_backward_of_its_own_stays_local():
    """Added later, as callbacks do, and trained apart from the model: it stays each rank's own."""
    first, second = pool(2).run(evaluator)
    for (own, reduced), (other, also_reduced) in zip(first, second, strict=True):
        assert own != other
        assert reduced == also_reduced
