"""Access to all ranks' vectors in shared memory, for what is no elementwise reduction, such as Adasum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from paceline.comm.collectives import shares_memory


@dataclass(frozen=True)
class SharedVectors:
    """The vectors that a rank sees during `ProcessGroup.on_all_vectors`."""

    views: tuple[Tensor, ...]  # every rank's vector, in the order of the ranks; shape (N,) each
    first: int  # this rank alone works on elements `first` to `last` (excluded), of all vectors: it may change them
    last: int  # likewise
    # Replaces a small CPU tensor by the reduction of all ranks' by an operation (of `torch.distributed.ReduceOp`, by
    # name), with the same bits on all. Collective; blocks.
    all_reduce: Callable[[Tensor, str], None]


OnAllVectors = Callable[[str, Tensor, Callable[[SharedVectors], None]], dist.Work]


def shared_vectors_of(group: dist.ProcessGroup) -> OnAllVectors | None:
    """Return the group's `on_all_vectors`; None where its ranks do not share memory. The same on every rank."""
    ours: Any = group
    return ours.on_all_vectors if shares_memory(group) else None
