"""Loading a state dict with or without torch's prefix `module.`, which our own has, too."""

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
    """Before loading: put the prefix back where it is missing, so that both forms load."""
    own = set(wrapper.module.state_dict())  # type: ignore[union-attr]
    names = [name for name in state if name.startswith(prefix)]
    bare = {name.removeprefix(prefix) for name in names}
    is_bare = len(bare & own) >= len(
        {name.removeprefix(PREFIX) for name in bare if name.startswith(PREFIX)} & own
    )
    if is_bare:
        for name in names:
            state[prefix + PREFIX + name.removeprefix(prefix)] = state.pop(name)
        _restore_versions(wrapper, state, prefix)


def _restore_versions(wrapper: Module, state: MutableMapping[str, Any], prefix: str) -> None:
    """The same for the modules' versions: `load_state_dict` reads the caller's mapping, so lend it our names."""
    modules = getattr(state, "_metadata", None) or {}
    lent = {}
    for name, facts in modules.items():
        if (name + ".").startswith(prefix) or not prefix:
            rest = (name + ".").removeprefix(prefix).removesuffix(".") if name else ""
            lent[(prefix + PREFIX + rest).removesuffix(".")] = facts
    lent = {name: facts for name, facts in lent.items() if name not in modules}
    modules.update(lent)
    wrapper._lent_versions = (modules, lent)  # type: ignore[assignment]


def take_back(wrapper: Module, incompatible: Any) -> None:
    """After loading: the caller's mapping is as it was."""
    modules, lent = wrapper.__dict__.pop("_lent_versions", ({}, {}))
    for name in lent:
        modules.pop(name, None)
