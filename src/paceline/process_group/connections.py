"""The connections that a group makes by itself: Gloo on an interface that all ranks can reach, or shared memory."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.comm.forked import keep_when_forked
from paceline.comm.given_up import aside
from paceline.comm.rendezvous import Rendezvous
from paceline.errors import ConfigurationError, PeerLostError
from paceline.host.addresses import LOOPBACK, own_address_towards
from paceline.process_group.host_collectives import HostVectors
from paceline.transports import Transport
from paceline.transports.c10d import C10dTransport
from paceline.transports.lossy_transport import LossyTransport
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
        if connects_now:  # whoever closes it before all have connected takes that from the others
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


def bounded_loss(module: str) -> Any:
    """A module of the lossy transport, loaded when used (numba: 0.5 s). ConfigurationError without numba. Local."""
    try:
        return importlib.import_module(f"paceline.transports.bounded_loss.{module}")
    except ImportError as error:
        raise ConfigurationError(
            f"a transport over UDP needs the package numba: pip install numba. ({error})"
        ) from error


def open_lossy_transport(
    store: dist.Store, rank: int, num_ranks: int, timeout: timedelta, num_ports: int = 1
) -> LossyTransport:
    """Connect the ranks for sums over UDP of which a bounded part may be lost, by so many ports of each.

    It listens on the interface that GLOO_SOCKET_IFNAME names, or on the address towards the job's master. As
    `open_transport`; raises ConfigurationError without numba or interface, PeerLostError if a rank does not come, and
    why.
    """
    meeting = Rendezvous(store, rank, num_ranks, timeout, "connecting to sum gradients over UDP")
    try:
        met = _meet(meeting, num_ranks, num_ports)
        return open_met_transport(rank, met, timeout)
    except PeerLostError:
        raise
    except Exception as error:  # whatever it is, the others would wait for this rank
        meeting.decline(str(error))
        raise


def introduce(address: str, num_ports: int = 1) -> Any:
    """Open sockets for sums over UDP with others than a group's ranks: an `Introduction`. Raises as `bounded_loss`."""
    bounded_loss("datagram_loop").compile_all()  # before anyone waits for this rank; takes seconds only once
    return bounded_loss("udp_socket").Introduction(address, num_ports)


def open_met_transport(place: int, met: Any, timeout: timedelta, num_servers: int = 0) -> LossyTransport:
    """The lossy transport of who is at `place` of a group that has met, of which the first ones are servers. Local."""
    made: LossyTransport = bounded_loss("lossy_link").LossyLink(place, met, timeout, num_servers)
    return made


def _meet(rendezvous: Rendezvous, num_ranks: int, num_ports: int = 1) -> Any:
    """As `udp_socket.meet`, on the address on which this rank takes datagrams."""
    bounded_loss("datagram_loop").compile_all()  # before anyone waits for this rank
    return bounded_loss("udp_socket").meet(rendezvous, datagram_address(num_ranks), num_ports)


def datagram_address(num_ranks: int) -> str:
    """The address of this host on which to take datagrams. Local. Raises as `udp_socket.address_of`."""
    interface = os.environ.get(INTERFACE, "").split(",")[0]
    if not interface:
        return address_towards(num_ranks) or LOOPBACK
    return str(bounded_loss("udp_socket").address_of(interface))
