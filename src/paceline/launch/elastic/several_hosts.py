"""Of a command line: where this host's agent listens, where the first one does, and what training needs."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator

from paceline.comm import TOKEN
from paceline.errors import ConfigurationError
from paceline.host.addresses import is_loopback
from paceline.launch import rendezvous_endpoint
from paceline.launch.command_line import LaunchArguments
from paceline.launch.elastic.agents import Agents, AgentSetting
from paceline.launch.elastic.plan import Address
from paceline.launch.elastic.vote import Quorum
from paceline.launch.stores import addresses_here

_PORT = 29500
_WAITS_RATIO = 10.0  # of --lost-after, that an agent waits for a majority or for ranks


@contextlib.contextmanager
def connected(arguments: LaunchArguments, start: Address, note: Callable[[str], None]) -> Iterator[Agents]:
    """The agent of this host among several.

    Raises ConfigurationError without a token that others do not know, or for an address that cannot be listened on.
    """
    first, is_first = where_the_first_is(arguments)
    args = arguments.torchrun
    listen = first if is_first else Address(args.local_addr, first.port)
    token = os.environ.get(TOKEN, "")
    if not token and not is_loopback(listen.host):
        raise ConfigurationError(
            f"--min-ranks on several hosts: whoever reaches {listen.host}:{listen.port} could end the training and get "
            f"its parameters. Give all hosts the same {TOKEN}, a secret such as `openssl rand -hex 16` makes."
        )
    setting = AgentSetting(
        name=f"{args.node_rank or 0:04d}-{socket.gethostname()}",
        num_ranks=arguments.num_local_ranks,
        start=start,
        listen=listen,
        first=None if is_first else first,
        token=token,
        needs=Quorum(hosts=arguments.num_machines, ranks=arguments.min_ranks or 1),
        patience_s=_WAITS_RATIO * arguments.lost_after_s,
    )
    try:
        agents = Agents(setting, note)
    except OSError as error:
        raise ConfigurationError(
            f"this host's agent cannot listen at {listen.host}:{listen.port} ({error.strerror}). Name a free port with "
            "--master-port, the same on all hosts, or this host's address with --local-addr."
        ) from error
    note(f"the agent of this host listens at {agents.address.host}:{agents.address.port}")
    try:
        yield agents
    finally:
        agents.close()


def where_the_first_is(arguments: LaunchArguments) -> tuple[Address, bool]:
    """Where the agents find each other, and whether that is here. ConfigurationError for an unknown name."""
    args = arguments.torchrun
    name, _, port = (args.rdzv_endpoint or f"{args.master_addr}:{args.master_port or _PORT}").rpartition(":")
    name = name.strip("[]")
    here = addresses_here(name)
    is_first = args.node_rank == 0 if args.rdzv_backend == "static" else bool(here)
    try:
        found = here or sorted({str(each[4][0]) for each in socket.getaddrinfo(name, None)})
    except socket.gaierror as error:
        raise ConfigurationError(
            f"nobody here knows the name {name} ({error.strerror}), where the hosts of this launch meet. Check the "
            "spelling, or name the address."
        ) from error
    return Address(found[0], int(port)), is_first


def find_own_address(arguments: LaunchArguments) -> None:
    """Choose the address of this host that the others reach; `arguments` is changed."""
    args = arguments.torchrun
    if args.local_addr is None:
        first, is_first = where_the_first_is(arguments)
        args.local_addr = first.host if is_first else rendezvous_endpoint.own_address(first.host)
