"""Reads from the command line where this host's agent and the first one listen, and what training needs."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Callable, Iterator

from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from paceline.comm import TOKEN
from paceline.errors import ConfigurationError
from paceline.host.addresses import is_loopback, own_address_towards
from paceline.launch import rendezvous_endpoint
from paceline.launch.command_line import LaunchArguments
from paceline.launch.elastic.agents import Agents, AgentSetting, opened
from paceline.launch.elastic.plan import Address
from paceline.launch.elastic.vote import Quorum
from paceline.launch.stores import addresses_here

_PORT = 29500
_WAITS_RATIO = 10.0  # of --lost-after, that an agent waits for a majority or for ranks


@contextlib.contextmanager
def connected(arguments: LaunchArguments, start: Address, note: Callable[[str], None]) -> Iterator[Agents]:
    """Run the agent of this host among several. Raises as `opened` does."""
    first, is_first = where_the_first_is(arguments)
    args = arguments.torchrun
    listen = first if is_first else Address(args.local_addr, first.port)
    setting = AgentSetting(
        name=f"{args.node_rank or 0:04d}-{socket.gethostname()}",
        num_ranks=arguments.num_local_ranks,
        start=start,
        listen=listen,
        first=None if is_first else first,
        token=os.environ.get(TOKEN, ""),
        needs=Quorum(hosts=arguments.num_machines, ranks=arguments.min_ranks or 1),
        patience_s=_WAITS_RATIO * arguments.lost_after_s,
    )
    remedy = "Name a free port with --master-port, the same on all hosts, or this host's address with --local-addr."
    with opened(setting, note, remedy) as agents:
        note(f"the agent of this host listens at {agents.address.host}:{agents.address.port}")
        yield agents


def where_the_first_is(arguments: LaunchArguments) -> tuple[Address, bool]:
    """Return where the agents find each other, and whether that is here. Raises ConfigurationError if it cannot be."""
    args = arguments.torchrun
    option, name, port = "--master-addr", args.master_addr.strip("[]"), args.master_port or _PORT
    if args.rdzv_endpoint:
        option, (name, port) = "--rdzv-endpoint", parse_rendezvous_endpoint(args.rdzv_endpoint, _PORT)
    option = f"{option} {name}"
    here = sorted(addresses_here(name), key=is_loopback)
    found = here or rendezvous_endpoint.addresses_of_meeting(name, option)
    is_first = args.node_rank == 0 if args.rdzv_backend == "static" else bool(here)
    if is_first and not here:
        raise ConfigurationError(
            f"{option} is no address of this machine, but --node-rank 0 says that the first host is here. Name an "
            "address of this machine. To join a job that trains already, pass another --node-rank and the address of a "
            "host that trains."
        )
    if _is_of_no_host(found[0]) or (is_first and is_loopback(found[0]) and not is_loopback(name)):
        raise ConfigurationError(
            f"{option} means {found[0]} here, at which no other host reaches this one. Name an address that all hosts "
            "reach."
        )
    return Address(found[0], port), is_first


def _is_of_no_host(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return parsed.is_unspecified or parsed.is_multicast or address == "255.255.255.255"


def find_own_address(arguments: LaunchArguments) -> None:
    """Choose the address of this host that the others reach; `arguments` is changed. Raises ConfigurationError."""
    args = arguments.torchrun
    first, is_first = where_the_first_is(arguments)
    asked = args.local_addr
    if asked is None:
        found = first.host if is_first else own_address_towards(first.host)
    else:
        found = min(addresses_here(asked), key=is_loopback)
    may_be_loopback = is_loopback(first.host) and (is_first or asked is not None)
    if not found or (is_loopback(found) and not may_be_loopback):
        raise ConfigurationError(
            f"this host has {found or 'no address'} on the way to the first one at {first.host}, so the others do not "
            "reach it. Name an address of the first host that all hosts reach (--master-addr), and one of this host "
            "(--local-addr). To try several hosts on one machine, give each its own: 127.0.0.1, 127.0.0.2."
        )
    args.local_addr = found
