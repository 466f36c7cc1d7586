"""Lets Accelerate's `prepare` hand on the batches of a sampler that gives each rank its own part already.

Accelerate gives rank r each batch whose number modulo the number of ranks is r. A `GlobalShuffle` hands out this rank's
batches only, so the others would never be trained. Accelerate also sets the epoch of a sampler that it has not
divided, in every iteration and counted from 0. So a position that was loaded would be lost.
"""

from __future__ import annotations

import functools
from typing import Any

from paceline.errors import ConfigurationError
from paceline.late_imports import when_imported


def register() -> None:
    """Change Accelerate's loaders as soon as Accelerate has been imported. Local."""
    when_imported("accelerate.data_loader", _change)


def _change(accelerate: Any) -> None:
    if not hasattr(accelerate, "DataLoaderAdapter"):
        return  # before 0.34, which must be imported all the same
    shard, loader = accelerate.BatchSamplerShard, accelerate.DataLoaderAdapter
    make_shard, make_loader = shard.__init__, loader.__init__

    @functools.wraps(make_shard)
    def init_shard(self: Any, batch_sampler: Any, *given: Any, **named: Any) -> None:
        if _is_divided(batch_sampler):
            given, named = (), {}  # as for one process: every batch is this rank's
        make_shard(self, batch_sampler, *given, **named)

    @functools.wraps(make_loader)
    def init_loader(self: Any, *given: Any, batch_sampler: Any = None, **named: Any) -> None:
        if _is_divided(batch_sampler):
            # Not `isinstance`: the dispatcher's `__class__` is the inner loader's.
            if issubclass(type(self), accelerate.DataLoaderDispatcher):
                raise ConfigurationError(
                    "dispatch_batches=True lets rank 0 read the batches of all ranks, but "
                    f"{type(batch_sampler).__name__} hands out one rank's. Leave dispatch_batches out."
                )
            batch_sampler = shard(batch_sampler)
        make_loader(self, *given, batch_sampler=batch_sampler, **named)

    shard.__init__, loader.__init__ = init_shard, init_loader


def _is_divided(batch_sampler: Any) -> bool:
    from paceline.data import GlobalBatches  # noqa: PLC0415  `import paceline` must not import torch

    return isinstance(batch_sampler, GlobalBatches)
