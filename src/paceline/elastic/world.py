"""c10d's default group, made anew for each membership in the same process."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

_TABLES = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "tags_to_pg",
    "pg_coalesce_state",
)


@dataclass(frozen=True)
class WorldKind:
    """How the script has opened its default group, so that the next one is of the same kind."""

    backend: str
    timeout: timedelta

    def open(self, store: dist.Store, rank: int, size: int) -> ProcessGroup:
        """Make the default group, in place of one that was forgotten. Collective over its ranks; blocks."""
        dist.init_process_group(self.backend, store=store, rank=rank, world_size=size, timeout=self.timeout)
        world = dist.group.WORLD
        assert world is not None
        return world


def forget_world() -> None:
    """Let c10d forget all its groups without a word to their ranks, which may be dead: so it never waits. Local."""
    c10d: Any = dist.distributed_c10d
    world = c10d._world
    c10d._update_default_pg(None)
    for name in _TABLES:
        getattr(world, name).clear()
    c10d._unregister_all_process_groups()
    world.group_count = 0
    # Each default group writes its rank's number before the lines of an error, and of its elder's.
    hook = sys.excepthook
    if hook.__name__ == "_distributed_excepthook":
        sys.excepthook = inspect.getclosurevars(hook).nonlocals["old_hook"]
