"""Connects the ranks of a group for sums over UDP."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from paceline.comm import Rendezvous
from paceline.errors import PeerLostError
from paceline.host.addresses import LOOPBACK
from paceline.process_group import address_towards
from paceline_lossy.datagrams.datagram_loop import compile_all
from paceline_lossy.datagrams.lossy_link import LossyLink
from paceline_lossy.datagrams.udp_socket import address_of, find_members
from paceline_lossy.lossy_transport import LossyTransport

_INTERFACE = "GLOO_SOCKET_IFNAME"  # Gloo's variable: the network interface to use


def open_lossy_transport(
    store: dist.Store, rank: int, num_ranks: int, timeout: timedelta, num_ports: int = 1
) -> LossyTransport:
    """Connect the ranks for sums over UDP that may lose a bounded part. Each rank sends from `num_ports` ports.

    It listens on the interface that GLOO_SOCKET_IFNAME names, or on the address towards the job's master. `store` must
    not be used for anything else. Collective; blocks until every rank has come.

    Raises:
        ConfigurationError: There is no such interface.
        PeerLostError: A rank did not come; the message says why.
    """
    rendezvous = Rendezvous(store, rank, num_ranks, timeout, "connecting to sum gradients over UDP")
    try:
        compile_all()  # before any rank waits for this one
        members = find_members(rendezvous, datagram_address(num_ranks), num_ports)
        return LossyLink(rank, members, timeout)
    except PeerLostError:
        raise
    except Exception as error:  # the others would otherwise wait for this rank until the timeout
        rendezvous.decline(str(error))
        raise


def datagram_address(num_ranks: int) -> str:
    """Return this host's address for datagrams. Local. Raises the errors of `address_of`."""
    interface = os.environ.get(_INTERFACE, "").split(",")[0]
    if not interface:
        return address_towards(num_ranks) or LOOPBACK
    return address_of(interface)
