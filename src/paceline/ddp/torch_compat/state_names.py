"""Loading a state dict with or without torch's prefix `module.`, which Paceline's own has, too."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch.nn import Module

PREFIX = "module."


def restore(
    wrapper: Module,
    state: MutableMapping[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Before loading: put the prefix back where it is missing, so that both forms load.

    A part of a state may fit in both forms, where the module has a child called `module`: then it is the wrapper's own.
    """
    own = set(wrapper.module.state_dict())  # type: ignore[union-attr]
    names = [name for name in state if name.startswith(prefix)]
    bare = {name.removeprefix(prefix) for name in names}
    of_wrapper = {name.removeprefix(PREFIX) for name in bare if name.startswith(PREFIX)}
    if len(bare & own) > len(of_wrapper & own):
        given = {prefix + PREFIX + name.removeprefix(prefix): name for name in names}
        state.update({restored: state.pop(name) for restored, name in given.items()})
        wrapper._paceline_restored_names = (given, *_lend_versions(state, prefix))  # type: ignore[assignment]


def _lend_versions(state: MutableMapping[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Put the prefix before the names of modules' versions, in the caller's mapping, which `load_state_dict` reads.

    Returns the mapping, and what it was.
    """
    modules = getattr(state, "_metadata", None) or {}
    before = dict(modules)
    for name, facts in before.items():
        if f"{name}.".startswith(prefix) or not prefix:
            rest = f"{name}.".removeprefix(prefix).removesuffix(".") if name else ""
            modules[(prefix + PREFIX + rest).removesuffix(".")] = facts
    return modules, before


def take_back(wrapper: Module, incompatible: Any) -> None:
    """After loading: unexpected names are as they were given, and so is the caller's mapping."""
    given, modules, before = wrapper.__dict__.pop("_paceline_restored_names", ({}, {}, {}))
    modules.clear()
    modules.update(before)
    unexpected = incompatible.unexpected_keys
    unexpected[:] = [given.get(name, name) for name in unexpected]
