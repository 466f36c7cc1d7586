"""Protection of a forked process: it leaves the rank's process groups alone, and does not even destroy them.

The destructors of Gloo's groups and of a store that this rank serves wait for threads. A forked process has none of
them, so it would wait for ever as it ends, or abort: torch's own does.

Two crashes are left to torch. They need a forked process that ends by `exit` and has ended threads of its own, and a
rank with many threads. Then torch joins threads whose memory is gone. Those are the threads of its thread pool, unless
`torch.set_num_threads` was called, and that of its profiler (`libkineto::ConfigLoader`), if the rank has profiled.
Workers of a DataLoader, and what else `multiprocessing` forks, do not end by `exit`.
"""

from __future__ import annotations

import os
from weakref import WeakSet

import torch.distributed as dist

from paceline.host.exit import keep_for_ever

_used: WeakSet[object] = WeakSet()


def keep_when_forked(group: object) -> None:
    """Let processes that are forked from now on never destroy this group, nor those that c10d knows. Local."""
    _used.add(group)


def _keep_groups() -> None:
    for group, (_, store) in dist.distributed_c10d._world.pg_map.items():
        keep_for_ever(group)
        keep_for_ever(store)
    for used in _used:
        keep_for_ever(used)


os.register_at_fork(after_in_child=_keep_groups)
