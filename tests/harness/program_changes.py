"""Changes of a module's parameters after it was wrapped: those that must be refused, and those that change nothing.

Rules
1. A change is drawn from a seed, and is the same on every rank and on every bare copy.
2. A module that was changed may be wrapped anew: the remedy that the refusal names.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from harness.program_model import Net


class Adapted(nn.Module):
    """A frozen layer with a product of two trainable matrices, as PEFT puts it in a layer's place."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.b(self.a(x))
        return result


@contextlib.contextmanager
def _swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _another(layer: nn.Linear) -> nn.Linear:
    return nn.Linear(layer.in_features, layer.out_features)


def _assign(net: Net) -> None:
    net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)


def _load_by_swapping(net: Net) -> None:
    with _swapping():
        net.load_state_dict(net.state_dict())


def _swap(*parameters: nn.Parameter) -> None:
    for one in parameters:
        torch.utils.swap_tensors(one, nn.Parameter(one.detach().clone(), requires_grad=one.requires_grad))


def _convert(net: Net) -> None:
    net.float()


def _convert_by_swapping(net: Net) -> None:
    with _swapping():
        net.float()


def _longer(net: Net) -> None:
    net.spare.data = torch.ones(1, dtype=net.spare.dtype)  # its output is the same by broadcasting


REFUSED: dict[str, Callable[[Net], Any]] = {
    "another head": lambda net: setattr(net, "right", _another(net.right)),
    "another parameter": lambda net: setattr(
        net.right, "weight", nn.Parameter(torch.randn_like(net.right.weight))
    ),
    "a parameter in the dictionary": lambda net: net.right._parameters.update(
        weight=nn.Parameter(torch.randn_like(net.right.weight))
    ),
    "a copy of a layer": lambda net: setattr(net, "trunk", copy.deepcopy(net.trunk)),
    "weight_norm": lambda net: nn.utils.weight_norm(net.right),
    "weight_norm, as a parametrization": lambda net: parametrizations.weight_norm(net.right),
    "LoRA": lambda net: setattr(net, "right", Adapted(net.right)),
    "LoRA without freezing": lambda net: setattr(
        net, "right", Adapted(net.right).requires_grad_(requires_grad=True)
    ),
    "a state that is assigned": _assign,
    "a state that is loaded by swapping": _load_by_swapping,
    "tensors that are swapped": lambda net: _swap(*net.parameters()),
    "one tensor that is swapped": lambda net: _swap(net.right.bias),
    "converted": _convert,
    "converted by swapping": _convert_by_swapping,
    "data of another shape": _longer,
}
OTHER_DATA = "other data of this size"
NEW_START = "a frozen layer replaced"
ALLOWED: dict[str, Callable[[Net], Any]] = {
    "prune": lambda net: prune.l1_unstructured(net.right, "weight", 0.3),
    "prune for good": lambda net: prune.remove(prune.l1_unstructured(net.left, "weight", 0.3), "weight"),
    "a layer in another": lambda net: setattr(net, "trunk", nn.Sequential(net.trunk)),
    OTHER_DATA: lambda net: setattr(net.spare, "data", torch.full_like(net.spare, 0.5)),
    NEW_START: lambda net: setattr(net, "frozen", _another(net.frozen).requires_grad_(requires_grad=False)),
}


def change(nets: Sequence[Net], seed: str, is_refused: bool, may_rename: bool) -> str:
    """Change all of these modules in the same way. Return which it was."""
    ways = REFUSED if is_refused else ALLOWED
    source = random.Random(f"change {seed}")
    way, values = source.choice(list(ways)), source.randrange(2**31)
    if not is_refused and not may_rename:
        way = OTHER_DATA
    elif not _is_plain(nets[0].right):
        way = "a copy of a layer" if is_refused else "a layer in another"
    for net in nets:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(values)
            try:
                ways[way](net)
            except RuntimeError:  # something else holds the tensor that shall be swapped
                net.trunk = copy.deepcopy(net.trunk)
            if not way.startswith("converted"):
                net.double()
        net.list_anew()
    return way


def _is_plain(layer: nn.Module) -> bool:
    """Return whether a layer trains, and was not changed before."""
    parameters = layer._parameters.values()
    return (
        type(layer) is nn.Linear
        and len(parameters) == 2
        and all(p is not None and p.requires_grad for p in parameters)
        and "weight" in layer._parameters
        and not layer._forward_pre_hooks
    )


def put_right(nets: Sequence[Net], way: str) -> None:
    """Give modules that were converted the precision in which they are compared, and resized parameters other nodes."""
    for net in nets:
        if way.startswith("converted"):
            net.double()
        elif net.spare.numel() == 1:
            net.spare = nn.Parameter(
                net.spare.detach().clone()
            )  # the old one's node knows the size of before
        net.list_anew()


def says_remedy(words: str) -> bool:
    """Return whether an error names what to do."""
    return "then wrap" in words
