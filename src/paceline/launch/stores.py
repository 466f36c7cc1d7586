"""Binds the stores that torch's launcher opens to one address, where torch's own listen on every interface.

Rules
1. A store listens on the address that its host's name has on this machine: with one machine usually loopback.
2. With several machines a name that means loopback here may mean something else there (Debian's 127.0.1.1): such a
   store listens everywhere, as torch's does, and the launcher says so.
3. Only this process is changed, and only while it launches.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    c10d_rendezvous_backend,
    dynamic_rendezvous,
    static_tcp_rendezvous,
)

LOOPBACK = "127.0.0.1"
_BACKLOG = 2048


@contextlib.contextmanager
def bound(num_machines: int, note: Callable[[str], None]) -> Iterator[None]:
    """Within this context torch's launcher opens its stores on one address each.

    Args:
        num_machines: That may take part; with one nobody reaches the stores from elsewhere.
        note: Called with one line if a store has to listen on every interface.
    """
    listening = _Listening(num_machines, note)
    with contextlib.ExitStack() as stack:
        for module in (c10d_rendezvous_backend, static_tcp_rendezvous):
            stack.enter_context(_replaced(module, "TCPStore", listening.store))
        handler: Any = dynamic_rendezvous.DynamicRendezvousHandler
        if hasattr(handler, "_create_tcp_store_server"):

            def create(_self: object, host: str, port: int) -> dist.Store:
                return listening.store(host, port, is_master=True, multi_tenant=True)

            stack.enter_context(_replaced(handler, "_create_tcp_store_server", create))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class _Listening:
    """Makes stores in place of `TCPStore`, with its arguments."""

    def __init__(self, num_machines: int, note: Callable[[str], None]) -> None:
        self._num_machines = num_machines
        self._note = note
        self._has_told = False

    def store(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        *rest: Any,
        **options: Any,
    ) -> dist.Store:
        place = self._place(host_name) if is_master else None
        listener = None if place is None else _listen(place, port)
        make: Any = dist.TCPStore
        if listener is not None:  # else torch says what is wrong with the port
            host_name, port = str(place), listener.getsockname()[1]
            options["master_listen_fd"] = listener.detach()  # it is the store's from now on
        store: dist.Store = make(host_name, port, world_size, is_master, *rest, **options)
        return store

    def _place(self, host_name: str) -> str | None:
        """The address to listen on; None for every one."""
        addresses = _addresses(host_name)
        if self._num_machines == 1:
            return next(iter(addresses), LOOPBACK)
        outside = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
        if outside:
            return outside[0]
        if not self._has_told:
            self._has_told = True
            self._note(
                f"the job's store listens on every interface, because {host_name} is no address of this machine's "
                "network; name one with --rdzv-endpoint or --local-addr. See docs/explain/security.md."
            )
        return None


def _addresses(host_name: str) -> list[str]:
    """The addresses behind a name that are this machine's own, IPv4 first."""
    try:
        found = socket.getaddrinfo(host_name or LOOPBACK, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    addresses = sorted({str(each[4][0]) for each in found}, key=lambda address: (":" in address, address))
    return [address for address in addresses if _is_mine(address)]


def _is_mine(address: str) -> bool:
    listener = _listen(address, 0)
    if listener is not None:
        listener.close()
    return listener is not None


def _listen(address: str, port: int) -> socket.socket | None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # As torch's store does: a connection in TIME_WAIT does not use the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        return None
    return listener
