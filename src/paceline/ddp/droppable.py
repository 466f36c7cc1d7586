"""Units that a step can leave out, as given in `droppable=`, and the parts of a module that they consist of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module, ModuleList, Parameter

from paceline.errors import ConfigurationError


@dataclass(frozen=True)
class Unit:
    """An entry of `droppable=`, which is dropped as a whole: its name, and its parameters, trainable or not."""

    name: str
    parameters: tuple[Parameter, ...]


def units_of(module: Module, droppable: Any) -> tuple[Unit, ...]:
    """Read `droppable=`: an iterable, each entry a unit of its own.

    Raises ConfigurationError if it is none, names what the module has not, or two entries have a parameter in common.
    """
    if droppable is None:
        return ()
    is_one = isinstance(droppable, (str, torch.Tensor)) or (
        isinstance(droppable, Module) and not isinstance(droppable, ModuleList)
    )
    if is_one or not isinstance(droppable, Iterable):
        raise ConfigurationError(
            f"droppable={_shown(droppable)} is not a list. Give what can be skipped, each entry by itself: "
            "droppable=list(net.blocks), or [net.backbone]."
        )
    whole = Parts(module)
    units = tuple(_unit(whole, entry) for entry in droppable)
    owners: dict[int, str] = {}
    for unit in units:
        for parameter in unit.parameters:
            if id(parameter) in owners:
                raise ConfigurationError(
                    f"droppable: {owners[id(parameter)]} and {unit.name} have a parameter in common, which would be "
                    "skipped with either. Leave one out, or make them one entry: [[first, second]]."
                )
            owners[id(parameter)] = unit.name
    return units


def _unit(whole: Parts, entry: Any) -> Unit:
    parts = [whole.part(given) for given in flat(entry)]
    parameters = {id(p): p for _, found in parts for p in found}
    name = " + ".join(name for name, _ in parts)
    if not parameters:
        raise ConfigurationError(f"droppable: {name or _shown(entry)} has no parameters. Leave it out.")
    return Unit(name, tuple(parameters.values()))


def flat(what: Any) -> Iterator[Any]:
    """Return the entries, with lists taken apart. A module is one entry, also where one can iterate over it."""
    if isinstance(what, Iterable) and not isinstance(what, (str, torch.Tensor, Module)):
        for part in what:
            yield from flat(part)
    else:
        yield what


class Parts:
    """The parts of a module, by object and by name. They are found once: a step may name hundreds of layers."""

    def __init__(self, module: Module) -> None:
        self._kind = type(module).__name__
        self._by_name: dict[str, Module | Parameter] = dict(module.named_parameters(remove_duplicate=False))
        self._by_name.update(module.named_modules(remove_duplicate=False))
        self._names: dict[int, str] = {}
        for name, part in self._by_name.items():
            self._names.setdefault(id(part), name)
        self._parameters: dict[str, tuple[Parameter, ...]] = {}

    def part(self, given: Any) -> tuple[str, tuple[Parameter, ...]]:
        """Return the name and the parameters of a part. Raises ConfigurationError if the module has no such part."""
        name = given if isinstance(given, str) else self._names.get(id(given))
        if name is None or name not in self._by_name:
            raise ConfigurationError(
                f"{_shown(given)} is not a part of this {self._kind}. Give modules or parameters of it, or names as in "
                "module.named_modules(): blocks.3 is one, and model.blocks.3 or module.blocks.3 is none."
            )
        if name not in self._parameters:
            part = self._by_name[name]
            self._parameters[name] = tuple(part.parameters()) if isinstance(part, Module) else (part,)
        return name or "the whole module", self._parameters[name]


def _shown(what: Any) -> str:
    return f"a {type(what).__name__}" if isinstance(what, (Module, torch.Tensor)) else repr(what)
