"""A fake NCCL for the device "late": collectives on streams of their own; `wait` makes a stream wait, not the host.

`register()` gives torch.distributed the backend "latenccl". What is NCCL's contract stands in `communicator.py`, the
collectives in `group.py`, and in `faults.py` how it is broken on purpose.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from device.late import DEVICE, start
from device.nccl.faults import FAULTS, broken
from device.nccl.group import BACKEND, LateProcessGroup

__all__ = ["BACKEND", "FAULTS", "LateProcessGroup", "broken", "register"]


def register() -> None:
    """Make `new_group(backend="latenccl")` work. A second call does nothing."""
    start()
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=[DEVICE])


def _make(what: Any, _options: object) -> LateProcessGroup:
    waits = getattr(what, "enable_reconfigure", False)  # from torch 2.14 on
    return LateProcessGroup(what.store, what.group_rank, what.group_size, what.timeout, waits=waits)
