"""Registers the backend `paceline` with c10d, without importing torch for those who only `import paceline`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from datetime import timedelta
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from paceline.comm import BACKEND_NAME

if TYPE_CHECKING:
    import torch.distributed as dist

_C10D = "torch.distributed.distributed_c10d"


def register() -> None:
    """Make `init_process_group("paceline")` and `new_group(backend="paceline")` work.

    Local; a second call does nothing. Before torch.distributed is imported, it is remembered until then.
    """
    if _C10D in sys.modules:
        _tell_c10d(sys.modules[_C10D])
    elif not any(isinstance(finder, _WhenC10dArrives) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenC10dArrives())


def _tell_c10d(c10d: Any) -> None:
    if c10d.is_available() if hasattr(c10d, "is_available") else True:
        backend = c10d.Backend
        if BACKEND_NAME not in backend.backend_list:
            backend.register_backend(BACKEND_NAME, _make, devices=["cpu", "cuda"])


def _make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    import torch.distributed as dist  # noqa: PLC0415  only those who ask for one pay for it

    from paceline.host.meeting import announce  # noqa: PLC0415

    announce(dist.PrefixStore("memory", store), rank)  # what is imported now may take seconds
    from paceline.process_group.backend import ProcessGroup  # noqa: PLC0415

    return ProcessGroup(store, rank, size, timeout)


class _WhenC10dArrives(MetaPathFinder):
    """Sees the import of torch.distributed once, and registers after it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _C10D:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader)
        return spec


class _Then(Loader):
    """The module's own loader, and the registration after it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _tell_c10d(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # source and data, for inspect and friends
