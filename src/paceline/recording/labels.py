"""Names of a model's layers for people: at most 64, by the deepest level of names that leaves no more."""

from __future__ import annotations

from collections.abc import Iterable

from torch.nn import Module, Parameter

_MOST = 64


def layer_of_each(module: Module) -> tuple[list[str], list[tuple[Parameter, int]]]:
    """Return the layers' names, in the order of registration, and for each trainable parameter which one it is of."""
    owners = [
        (name.rpartition(".")[0], parameter)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]
    depth = _depth([owner for owner, _ in owners])
    labels: dict[str, int] = {}
    found = []
    for owner, parameter in owners:
        label = _cut(owner, depth) or type(module).__name__
        found.append((parameter, labels.setdefault(label, len(labels))))
    return list(labels), found


def range_of(names: Iterable[str]) -> str:
    """Return a name for the parameters of one bucket: their layer, or the first and the last one."""
    owners = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    if not owners:
        return ""
    return owners[0] if len(owners) == 1 else f"{owners[0]} to {owners[-1]}"


def _depth(owners: list[str]) -> int:
    deepest = max((owner.count(".") + 1 for owner in owners), default=1)
    return next(
        (depth for depth in range(deepest, 1, -1) if len({_cut(x, depth) for x in owners}) <= _MOST), 1
    )


def _cut(owner: str, depth: int) -> str:
    return ".".join(owner.split(".")[:depth])
