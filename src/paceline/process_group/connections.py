"""The connections that a group makes by itself: Gloo on an interface that all ranks can reach, or shared memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.comm.forked import keep_when_forked
from paceline.comm.given_up import aside
from paceline.errors import PeerLostError
from paceline.host.addresses import LOOPBACK, own_address_towards
from paceline.process_group.host_collectives import HostVectors
from paceline.transports import Transport
from paceline.transports.c10d import C10dTransport
from paceline.transports.shared_memory import join_host

Gloo = Any  # a ProcessGroupGloo; torch's stubs know none of its methods

INTERFACE = "GLOO_SOCKET_IFNAME"  # Gloo's variable: the network interface to use


def address_towards(num_hosts: int) -> str:
    """Return this host's address on the route to the master; "" if GLOO_SOCKET_IFNAME decides, or it is unknown."""
    if os.environ.get(INTERFACE):
        return ""
    if num_hosts == 1:
        return LOOPBACK
    return own_address_towards(os.environ.get("MASTER_ADDR", ""))


def make_gloo(
    store: dist.Store, rank: int, size: int, timeout: timedelta, address: str, connects_now: bool = False
) -> Gloo:
    """Make a Gloo group that listens on `address` ("": where Gloo thinks best).

    It connects two ranks when first used, which blocks until both use it; or all at once, which blocks until all come.
    """
    gloo: Any = dist.ProcessGroupGloo
    options: Any = timeout
    if address:
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [gloo.create_device(hostname=address, lazy_init=not connects_now)]

    def make() -> Gloo:
        made = gloo(store, rank, size, options)
        if connects_now:  # a rank that closes it before all have connected takes that from the others
            made.barrier(dist.BarrierOptions()).wait()
        return made

    try:
        made = aside(make)
    except RuntimeError as error:
        raise PeerLostError(
            f"rank {rank} could not connect to all {size} ranks of a new group: one has ended or cannot be reached. "
            f"The backend said: {error}"
        ) from error
    keep_when_forked(made)
    return made


class OpenedWhenUsed:
    """A Gloo group that `make` opens when something of it is first used: collective then, and blocks."""

    def __init__(self, make: Callable[[], Gloo]) -> None:
        self._make = make

    def __getattr__(self, name: str) -> Any:
        if "_made" not in vars(self):
            self._made = self._make()
        return getattr(self._made, name)


def open_vectors(store: dist.Store, rank: int, num_ranks: int, timeout: timedelta) -> HostVectors | None:
    """Let ranks see each other's vectors in memory of their own. Returns None if they are not all on one host.

    Nothing else uses `store`. Collective; blocks until every rank has come.
    """
    host = join_host(dist.PrefixStore("memory", store), rank, num_ranks, timeout)
    return HostVectors(host, timeout.total_seconds()) if host.is_only_one else None


def open_transport(store: dist.Store, rank: int, num_ranks: int, timeout: timedelta) -> Transport:
    """Connect the ranks for messages of a reduction's own. Collective; blocks until every rank has come."""
    address = address_towards(num_ranks)
    return C10dTransport(make_gloo(dist.PrefixStore("gloo", store), rank, num_ranks, timeout, address))
