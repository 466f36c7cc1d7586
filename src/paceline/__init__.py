"""Paceline: data-parallel training on PyTorch.

`import paceline` costs nothing beyond `import torch`, and `paceline --help` not even that: the names below are
imported when they are first used (PEP 562).
"""

from __future__ import annotations

import os as _os
from typing import TYPE_CHECKING

from paceline.integrations.accelerate_loaders import register as _register_loaders
from paceline.integrations.lightning_strategy import register as _register_strategy
from paceline.late_imports import on_first_use
from paceline.process_group.registration import register as _register_backend
from paceline.version import __version__

if TYPE_CHECKING:
    from paceline import comm as comm
    from paceline import compression as compression
    from paceline import data as data
    from paceline import observe as observe
    from paceline import optim as optim
    from paceline import reductions as reductions
    from paceline import schedules as schedules
    from paceline.ddp import DistributedDataParallel, SyncBatchNorm, convert_sync_batchnorm, windows
    from paceline.elastic import Elastic
    from paceline.integrations.torch_patch import patch_torch
    from paceline.launch.notebook import notebook_launcher

__all__ = [
    "DistributedDataParallel",
    "Elastic",
    "SyncBatchNorm",
    "__version__",
    "convert_sync_batchnorm",
    "notebook_launcher",
    "patch_torch",
    "windows",
]

_PACKAGES = "comm compression data observe optim reductions schedules"
__getattr__ = on_first_use(
    __name__,
    {
        "ddp": "DistributedDataParallel SyncBatchNorm convert_sync_batchnorm windows",
        "elastic": "Elastic",
        "integrations.torch_patch": "patch_torch",
        "launch.notebook": "notebook_launcher",
    },
    packages=_PACKAGES,
)


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES.split()])


_register_backend()  # init_process_group("paceline"); imports no torch
_register_strategy()  # Lightning's Trainer(strategy="paceline"); imports no Lightning
_register_loaders()  # Accelerate leaves our samplers whole; imports no Accelerate

if "PACELINE_PEERS" in _os.environ and not {"PACELINE_LINE", "PACELINE_AGENT_DOOR"} & {*_os.environ}:
    from paceline.elastic.guest import prepare as _prepare

    _prepare()  # an engine has started this rank, alone
