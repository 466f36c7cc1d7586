"""Measures the link between the hosts that `paceline plan` runs on: under a launcher, every rank takes part."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from paceline.host.processes import whereabouts

_TIMEOUT_S = 60.0
_LONG_ENOUGH_S = 0.1  # of the message that measures the rate: TCP fills a link with latency slowly


@dataclass(frozen=True)
class LinkHere:
    """The link between hosts, measured over TCP while all ranks sent at once."""

    num_hosts: int  # between which
    ranks_per_host: int  # of the host with most
    bytes_per_s: float  # of a host, in each direction
    latency_s: float  # from the start of a round to the arrival of a short message
    message_s: float  # of a further message in the same round
    # Whether the hosts are emulated, or containers: then it contains what sharing a machine costs.
    on_one_machine: bool = False


def measure_link() -> tuple[int, LinkHere | None]:
    """Return this rank, and the link between hosts, equal on all ranks. None on one host. Collective; PeerLostError."""
    import torch.distributed as dist  # noqa: PLC0415  takes seconds

    from paceline.process_group.connections import address_towards, make_gloo  # noqa: PLC0415
    from paceline.schedules import Topology  # noqa: PLC0415
    from paceline.transports.link_probe import probe  # noqa: PLC0415
    from paceline.transports.transport import C10dTransport  # noqa: PLC0415

    timeout = timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group("gloo", timeout=timeout)
    try:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        places: list[Any] = [None] * num_ranks
        dist.all_gather_object(places, _machine_and_host())
        names = [host for _, host in places]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        if len(numbers) == 1:
            return rank, None
        topology = Topology(tuple(numbers[name] for name in names))
        store = dist.PrefixStore("paceline plan", dist.distributed_c10d._get_default_store())
        gloo = make_gloo(store, rank, num_ranks, timeout, address_towards(topology.num_hosts))
        between = probe(C10dTransport(gloo), topology, _TIMEOUT_S, _LONG_ENOUGH_S).between
        dist.barrier()  # a rank that leaves first closes its connections
    finally:
        dist.destroy_process_group()
    most = max(map(len, topology.ranks_of_host))
    on_one_machine = len({machine for machine, _ in places}) == 1
    link = (between.bytes_per_s, between.latency_s, between.message_s)
    return rank, LinkHere(topology.num_hosts, most, *link, on_one_machine)


def _machine_and_host() -> tuple[str, str]:
    """Return a text that is equal for ranks of one machine, and one for ranks of one host.

    Hosts that are emulated on one machine have a network namespace each.
    """
    try:
        return whereabouts(), whereabouts("net")
    except OSError:
        name = os.uname().nodename
        return name, name
