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
from paceline_lossy.datagrams.udp_socket import address_of, meet
from paceline_lossy.lossy_transport import LossyTransport

_INTERFACE = "GLOO_SOCKET_IFNAME"  # Gloo's variable: the network interface to use


def open_lossy_transport(
    store: dist.Store, rank: int, num_ranks: int, timeout: timedelta, num_ports: int = 1
) -> LossyTransport:
    """Connect the ranks for sums over UDP that may lose a bounded part, by `num_ports` ports of each.

    It listens on the interface that GLOO_SOCKET_IFNAME names, or on the address towards the job's master. Nothing else
    uses `store`. Collective; blocks until every rank has come.

    Raises:
        ConfigurationError: There is no such interface.
        PeerLostError: A rank did not come; says why.
    """
    meeting = Rendezvous(store, rank, num_ranks, timeout, "connecting to sum gradients over UDP")
    try:
        compile_all()  # before any rank waits for this one
        met = meet(meeting, datagram_address(num_ranks), num_ports)
        return LossyLink(rank, met, timeout)
    except PeerLostError:
        raise
    except Exception as error:  # whatever it is, the others would wait for this rank
        meeting.decline(str(error))
        raise


def datagram_address(num_ranks: int) -> str:
    """Return the address of this host on which to take datagrams. Local. Raises as `address_of`."""
    interface = os.environ.get(_INTERFACE, "").split(",")[0]
    if not interface:
        return address_towards(num_ranks) or LOOPBACK
    return address_of(interface)
