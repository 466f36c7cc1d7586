"""The connections that a group makes by itself: Gloo on an interface that all ranks can reach, or shared memory."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.transports import Transport
from paceline.transports.c10d import C10dTransport
from paceline.transports.shared_memory import SharedMemoryTransport, join_host

Gloo = Any  # a ProcessGroupGloo; torch's stubs know none of its methods

INTERFACE = "GLOO_SOCKET_IFNAME"  # Gloo's variable: the network interface to use
_DISCARD_PORT = 9  # nothing is sent: connecting a datagram socket only asks the kernel for the route


def address_towards(num_hosts: int) -> str:
    """Return the address under which the other hosts reach this one: that of the route to the job's master.

    It is "" where GLOO_SOCKET_IFNAME decides, or nothing is known.
    """
    if os.environ.get(INTERFACE):
        return ""
    if num_hosts == 1:
        return "127.0.0.1"
    master = os.environ.get("MASTER_ADDR", "")
    try:
        found = socket.getaddrinfo(master, _DISCARD_PORT, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, place = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def make_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta, address: str) -> Gloo:
    """Make a Gloo group that listens on `address` ("": where Gloo thinks best), and connects when first used."""
    if not address:
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=address, lazy_init=True)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def open_transport(store: dist.Store, rank: int, num_ranks: int, timeout: timedelta) -> Transport:
    """Connect the ranks for messages of their own, beside any process group: through shared memory on one host.

    Args:
        store: Used for this alone.
        rank: Of this process.
        num_ranks: How many take part.
        timeout: How long a rank waits for another to connect.

    Contract:
        Collective over these ranks.  Blocks: until every rank has come.
    """
    host = join_host(dist.PrefixStore("memory", store), rank, num_ranks, timeout)
    if len(host.hosts) == 1:
        return SharedMemoryTransport(host)
    address = address_towards(len(host.hosts))
    return C10dTransport(make_gloo(dist.PrefixStore("gloo", store), rank, num_ranks, timeout, address))
