"""How the ranks of `BoundedLoss` are connected: among themselves over UDP, or by a transport that is given."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from paceline.comm.collectives import device_for_metadata, launch_broadcast
from paceline.comm.lane import Lane
from paceline.process_group.connections import open_lossy_transport, store_of_job, timeout_of
from paceline.transports import LossyTransport


class LossyConnection:
    """The link over one process group, and the lane on which it is opened and handed its buckets.

    Contract:
        Collective: making one, which does not block.
    """

    def __init__(
        self, process_group: ProcessGroup, connect: Callable[[ProcessGroup], LossyTransport]
    ) -> None:
        self._open = connect
        self._group = process_group
        self._link: LossyTransport | None = None
        self.lane = Lane(f"paceline bounded-loss lane of rank {process_group.rank()}")
        self._let_go = weakref.finalize(self, self.lane.close, 0.0)

    def counters(self) -> dict[str, int]:
        return {} if self._link is None else self._link.counters

    def link(self) -> LossyTransport:
        """The link, opened at its first use. Collective the first time; blocks; on the lane."""
        if self._link is None:
            self._link = self._open(self._group)
        return self._link


def over_udp(
    process_group: ProcessGroup, device: torch.device, paths: int
) -> Callable[[ProcessGroup], LossyTransport]:
    """Launch what the ranks must know of each other to connect; the returned function connects them."""
    timeout: timedelta = timeout_of(process_group)
    store = store_of_job("BoundedLoss")
    token = torch.tensor(
        [secrets.randbits(62)], device=device_for_metadata(process_group, device)
    )  # rank 0's, so it is the same whatever failed before on one of the ranks
    sent = launch_broadcast(token, process_group, source=0)

    def connect(group: ProcessGroup) -> LossyTransport:
        sent.wait()
        prefixed = dist.PrefixStore(f"paceline/bounded_loss/{int(token.item())}", store)
        return open_lossy_transport(prefixed, group.rank(), group.size(), timeout, paths)

    return connect
