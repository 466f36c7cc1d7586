"""c10d's default group, made anew for each membership in the same process."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from paceline.comm.collectives import backend_of, timeout_of
from paceline.errors import ConfigurationError

_TABLES = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "tags_to_pg",
    "pg_coalesce_state",
)
_REACH = timedelta(seconds=3)  # for one attempt to reach a store


@dataclass(frozen=True)
class WorldKind:
    """The kind of the script's default group, so that the next one is of the same kind."""

    backend: str
    timeout: timedelta
    device_id: torch.device | None = None  # the accelerator that it is bound to

    @classmethod
    def of(cls, world: ProcessGroup) -> WorldKind:
        """Describe a default group. One of several backends is known by all of them, as "cpu:gloo,cuda:nccl"."""
        name = backend_of(world)
        known = name if name in dist.Backend.backend_list else str(dist.get_backend_config(world))
        return cls(known, timeout_of(world), world.bound_device_id)

    def open(self, store: dist.Store, rank: int, size: int) -> ProcessGroup:
        """Make the default group, in place of one that was forgotten. Collective over its ranks; blocks."""
        dist.init_process_group(
            self.backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=self.timeout,
            device_id=self.device_id,
        )
        world = dist.group.WORLD
        assert world is not None
        return world


class ApartWorld(ProcessGroup):
    """Takes the place of the default group while this rank is not at the step of the others: its collectives raise."""

    def __init__(self) -> None:
        world: Any = dist.group.WORLD
        super().__init__(world.rank(), world.size())  # type: ignore[call-arg]  # as a group in Python
        self._world = world
        self._put(world, self)

    def end(self) -> None:
        """Put the default group back, unless it was forgotten meanwhile. Local."""
        if dist.group.WORLD is self:
            self._put(self, self._world)

    @staticmethod
    def _put(before: ProcessGroup, after: ProcessGroup) -> None:
        c10d: Any = dist.distributed_c10d
        c10d._update_default_pg(after)
        for name in _TABLES:
            table = getattr(c10d._world, name)
            if before in table:
                table.setdefault(after, table[before])


def _refuse(world: ApartWorld, *_: object, **__: object) -> None:
    raise ConfigurationError(
        f"rank {world.rank()} came in while the others trained, and communicates before its first step, which no other "
        "rank does. Let epochs begin where the others are, by `for epoch in range(sampler.epoch, epochs)`, and "
        "communicate before paceline.Elastic(...) or within windows."
    )


for _name in (
    "allgather",
    "allreduce",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
):
    setattr(ApartWorld, _name, _refuse)  # others raise in torch's words: there is no backend


def reach_store(host: str, port: int, timeout: timedelta, is_over: Callable[[], bool]) -> dist.TCPStore:
    """Return a client of the store at this address, whose operations have this timeout. Blocks.

    If the store's agent was lost, torch tries again until the timeout, and nothing can stop it. This gives up a moment
    after `is_over`. Raises torch's DistNetworkError if the store was not reached.
    """
    until_s = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            store = dist.TCPStore(
                host, port, is_master=False, wait_for_workers=False, timeout=min(_REACH, timeout)
            )
        except dist.DistNetworkError:
            if is_over() or time.monotonic() >= until_s:
                raise
        else:
            store.set_timeout(timeout)
            return store


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
