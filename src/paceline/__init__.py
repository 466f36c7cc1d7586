"""Paceline: data-parallel training on PyTorch.

`import paceline` costs nothing beyond `import torch`, and `paceline --help` not even that: the names below are
imported when they are first used (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline.integrations.lightning_strategy import register as _register_strategy
from paceline.process_group.registration import register as _register_backend
from paceline.version import __version__

if TYPE_CHECKING:
    from paceline.ddp import DistributedDataParallel, SyncBatchNorm, convert_sync_batchnorm, windows
    from paceline.integrations.torch_patch import patch_torch
    from paceline.observe.workload_recording import record_workload

__all__ = [
    "DistributedDataParallel",
    "SyncBatchNorm",
    "__version__",
    "convert_sync_batchnorm",
    "patch_torch",
    "record_workload",
    "windows",
]

_HOME_OF = {
    "DistributedDataParallel": "paceline.ddp",
    "SyncBatchNorm": "paceline.ddp",
    "convert_sync_batchnorm": "paceline.ddp",
    "patch_torch": "paceline.integrations.torch_patch",
    "record_workload": "paceline.observe.workload_recording",
    "windows": "paceline.ddp",
}


def __getattr__(name: str) -> Any:
    """Import the public name `name` from its home on first use."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


_register_backend()  # init_process_group("paceline"); imports no torch
_register_strategy()  # Lightning's Trainer(strategy="paceline"); imports no Lightning
