"""A fake NCCL for the device "late": collectives on streams of their own; `wait` makes a stream wait, not the host.

`register()` gives torch.distributed the backends "latenccl", and "latemixed" with Gloo for the host's tensors.
`communicator.py` states NCCL's contract, and `exchange.py` that of an abort. The collectives are in `group.py`.
`faults.py` lists what tests break on purpose, `moments.py` where they let a rank die.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from device.late import DEVICE, start
from device.nccl.faults import FAULTS, broken
from device.nccl.group import BACKEND, MIXED, LateProcessGroup, MixedProcessGroup

__all__ = ["BACKEND", "FAULTS", "MIXED", "LateProcessGroup", "broken", "register"]


def register() -> None:
    """Make `new_group(backend="latenccl")` work. A second call does nothing."""
    start()
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=[DEVICE])
        dist.Backend.register_backend(MIXED, _make_mixed, extended_api=True, devices=["cpu", DEVICE])


def _make(what: Any, _options: object) -> LateProcessGroup:
    waits = getattr(what, "enable_reconfigure", False)  # from torch 2.14 on
    return LateProcessGroup(what.store, what.group_rank, what.group_size, what.timeout, waits=waits)


def _make_mixed(what: Any, _options: object) -> MixedProcessGroup:
    return MixedProcessGroup(what.store, what.group_rank, what.group_size, what.timeout)
