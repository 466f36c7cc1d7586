"""The c10d backend `paceline`: a ProcessGroup that performs collectives through shared memory and between hosts.

The names besides `register` are for reductions that have connections of their own. Most are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.late_imports import on_first_use
from paceline.process_group.registration import register

if TYPE_CHECKING:
    from paceline.process_group.connections import address_towards, open_transport, open_vectors
    from paceline.process_group.executor import PIECE_BYTES, Executor, KeptMemory
    from paceline.process_group.folds import flat_of, write_back
    from paceline.process_group.host_collectives import HostVectors, SharedVectors, shared_vectors_of

__all__ = [
    "PIECE_BYTES",
    "Executor",
    "HostVectors",
    "KeptMemory",
    "SharedVectors",
    "address_towards",
    "flat_of",
    "open_transport",
    "open_vectors",
    "register",
    "shared_vectors_of",
    "write_back",
]

__getattr__ = on_first_use(
    __name__,
    {
        "connections": "address_towards open_transport open_vectors",
        "executor": "Executor KeptMemory PIECE_BYTES",
        "folds": "flat_of write_back",
        "host_collectives": "HostVectors SharedVectors shared_vectors_of",
    },
)
