"""Connections of its own for Adasum, and the thread that uses them.

Rules
1. What Adasum sends never meets other traffic: whatever the caller's group is, it has shared memory of its own where
   all ranks are on one host, else a Gloo group of its own. Both are made by c10d's store alone, without `new_group`, so
   that is safe for groups over some of the world's ranks.
2. Their name in the store is drawn by rank 0 and broadcast over the caller's group at the first launch. So it
   cannot differ between ranks that have a different history, such as a wrapping that was refused on one of them.
3. Everything that blocks happens on a lane: Adasums are performed in the order of their launch.
4. A tensor of an accelerator is staged through host memory.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from paceline.comm.collectives import device_for_words, launch_broadcast
from paceline.comm.lane import Lane, LaneWork
from paceline.comm.pending import PendingWork
from paceline.errors import ConfigurationError
from paceline.process_group.connections import open_transport
from paceline.process_group.executor import Executor, flat_view
from paceline.reductions.adasum.operator import Segments
from paceline.reductions.adasum.performance import Norms, Performance
from paceline.schedules import Topology
from paceline.schedules.vector_halving import vector_halving

FindTopology = Callable[[Executor, float], Topology]
_DEFAULT_TIMEOUT = timedelta(minutes=30)


class Connection:
    """Adasum over the ranks of one process group.

    Args:
        process_group: Over whom; used once, for a broadcast.
        device: Of the tensors.
        find_topology: Says, with an executor and a time limit in seconds, where the ranks are. Collective.

    Contract:
        Collective: making one, and `launch`; neither waits.
    """

    def __init__(
        self, process_group: ProcessGroup, device: torch.device, find_topology: FindTopology
    ) -> None:
        self.process_group = process_group
        self._find_topology = find_topology
        self._timeout = timeout_of(process_group)
        self._store = _store()
        words = device_for_words(process_group, device)
        self._token = torch.tensor([secrets.randbits(62)], device=words)
        self._token_sent = launch_broadcast(self._token, process_group, source=0)
        self._performance: Performance | None = None
        self._lane = Lane(f"paceline adasum lane of rank {process_group.rank()}")
        self._let_go = weakref.finalize(self, self._lane.close, 0.0)

    def launch(self, flat: Tensor, segments: Segments, keep: Callable[[Norms], None]) -> PendingWork:
        """Start replacing `flat` by the Adasum of all ranks' vectors.

        Args:
            flat: Contiguous, shape (N,), floating; mutated until the result is done.
            segments: Which elements belong to which tensor.
            keep: Is given the norms before the result is done, on the lane's thread.
        """

        def perform() -> None:
            with flat_view(flat, is_output=True) as values:
                keep(self._connect().run(values, segments))

        work = LaneWork(perform, [flat], "adasum")
        self._lane.launch(work, at_once=False)
        return PendingWork(work)

    def _connect(self) -> Performance:
        """At the first use: meet the other ranks."""
        if self._performance is None:
            self._token_sent.wait()
            store = dist.PrefixStore(f"paceline/adasum/{int(self._token.item())}", self._store)
            group = self.process_group
            transport = open_transport(store, group.rank(), group.size(), self._timeout)
            timeout_s = self._timeout.total_seconds()
            topology = self._find_topology(Executor(transport), timeout_s)
            self._performance = Performance(transport, vector_halving(topology), timeout_s)
        return self._performance


def timeout_of(process_group: ProcessGroup) -> timedelta:
    """How long the group waits for a collective; half an hour where it does not say."""
    ours: Any = process_group
    found = getattr(ours, "_timeout", None)
    if not isinstance(found, timedelta):
        try:
            found = ours._get_backend(ours._device_types[0]).options._timeout
        except (AttributeError, IndexError, RuntimeError):
            found = None
    return found if isinstance(found, timedelta) else _DEFAULT_TIMEOUT


def _store() -> dist.Store:
    try:
        return dist.distributed_c10d._get_default_store()
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigurationError(
            "Adasum makes connections of its own and finds the other ranks by the job's store, but this job has none "
            "(it was launched by MPI?). Call init_process_group with a store or an init_method, as torchrun does."
        ) from error
