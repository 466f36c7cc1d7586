"""Imports that happen late: a package's public names on first use, and an action once a module has been imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[Any], None]


def on_first_use(package: str, names_of: Mapping[str, str], packages: str = "") -> Callable[[str], Any]:
    """Return a package's `__getattr__` (PEP 562) that imports names when used.

    `names_of` has those of each module, and `packages` the packages inside that are used as attributes.
    """
    home_of = {name: module for module, names in names_of.items() for name in names.split()}

    def public_name(name: str) -> Any:
        if name in packages.split():
            return importlib.import_module(f"{package}.{name}")
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{home_of[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return public_name


def when_imported(name: str, action: Action) -> None:
    """Call `action(module)` once `name` has been imported, or at once; its exceptions reach the importer. Local."""
    if name in sys.modules:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Awaited(name, action))


class _Awaited(MetaPathFinder):
    """A finder that runs an action after the import of one module. Other finders find the module."""

    def __init__(self, name: str, action: Action) -> None:
        self._name = name
        self._action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, self._action)
        return spec


class _Then(Loader):
    """The module's own loader, and the action after it."""

    def __init__(self, loader: Any, action: Action) -> None:
        self._loader = loader
        self._action = action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader  # leave no trace
        self._loader.exec_module(module)
        self._action(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # source and data, for inspect and friends
