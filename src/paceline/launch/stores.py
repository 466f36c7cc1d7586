"""Opens the stores of torch's launcher: bound to one address, where torch's own listen on every interface.

Rules
1. A store listens on the address that its host's name has on this machine: with one machine usually loopback.
2. With several machines, a name that means loopback here may mean something else there (Debian's 127.0.1.1). Then the
   store listens everywhere, as torch's does, and the launcher says so.
3. The first store of a launch over several machines is where they meet (`machines`), before torch's rendezvous.
4. A file by which machines meet is its user's alone, holds the job's token, and goes with the last launcher.
5. Only this process is changed, and only while it launches.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    c10d_rendezvous_backend,
    dynamic_rendezvous,
    static_tcp_rendezvous,
)
from typing_extensions import Self

from paceline.comm import RANKS_OF_HOST, TOKEN
from paceline.host.addresses import LOOPBACK, addresses_of, is_loopback
from paceline.launch.machines import MachineRendezvous

_BACKLOG = 2048
_TOKEN_KEY, _IN_FILE = "paceline token", "paceline launchers"


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class Listening:
    """A context within which torch's launcher opens its stores on one address each; for one machine, on loopback.

    `rendezvous` compares the machines in the first store. `when_met` is called with that store, the launch's id and the
    number of all ranks, or 0 if some may still come. `note` is called with lines for the user.
    """

    def __init__(
        self,
        num_machines: int,
        note: Callable[[str], None],
        rendezvous: MachineRendezvous | None = None,
        when_met: Callable[[dist.Store, str, int], None] | None = None,
    ) -> None:
        self._when_met = when_met
        self._num_machines = num_machines
        self._note = note
        self._rendezvous = rendezvous
        self._has_told = False
        self._file: tuple[Path, dist.Store] | None = None
        self._within = contextlib.ExitStack()

    def __enter__(self) -> Self:
        enter = self._within.enter_context
        may_serve = functools.partial(self.store, serves_if_mine=True)
        enter(_replaced(c10d_rendezvous_backend, "TCPStore", may_serve))
        enter(_replaced(c10d_rendezvous_backend, "FileStore", self.file_store))
        enter(_replaced(static_tcp_rendezvous, "TCPStore", self.store))
        handler: Any = dynamic_rendezvous.DynamicRendezvousHandler
        if hasattr(handler, "_create_tcp_store_server"):

            def create(_: object, host: str, port: int) -> dist.Store:
                return self.store(host, port, is_master=True, multi_tenant=True)

            enter(_replaced(handler, "_create_tcp_store_server", create))
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the file by which the machines met, if this is the last to leave it."""
        self._within.close()
        if self._file is not None:
            path, store = self._file
            # A store that is destroyed writes to its file, and would make one again that another launcher has removed.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
            with contextlib.suppress(RuntimeError, OSError):
                if store.add(_IN_FILE, -1) <= 0:
                    path.unlink()

    def store(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        *rest: Any,
        serves_if_mine: bool = False,
        **options: Any,
    ) -> dist.Store:
        """Open a store in place of `TCPStore`, with its arguments."""
        place = self._place(host_name) if is_master else None
        listener = None if place is None else _listen(place, port)
        if serves_if_mine and not is_master and self._num_machines > 1:
            # Torch knows fewer of a machine's addresses than the kernel. Only one launcher of a machine can bind.
            place = next(iter(addresses_here(host_name)), None)
            listener = None if place is None else _listen(place, port)
            is_master = listener is not None
        make: Any = dist.TCPStore
        if listener is not None:  # else torch says what is wrong with the port
            host_name, port = str(place), listener.getsockname()[1]
            options["master_listen_fd"] = listener.detach()  # it is the store's from now on
        store: dist.Store = make(host_name, port, world_size, is_master, *rest, **options)
        self._meet(store, is_master)
        return store

    def file_store(self, path: str) -> dist.Store:
        """Open the file by which machines meet, in place of `FileStore`."""
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        store = dist.FileStore(path)  # without a number of users it stays until `__exit__`
        self._file = Path(path), store
        if TOKEN not in os.environ:  # a process that may read the file belongs to the job
            os.environ[TOKEN] = store.compare_set(_TOKEN_KEY, "", secrets.token_hex(16)).decode()
        store.add(_IN_FILE, 1)
        self._meet(store, is_server=False)
        return store

    def _meet(self, store: dist.Store, is_server: bool) -> None:
        """Compare the machines, in the first store of the launch; the ranks are told how many each one has."""
        rendezvous, self._rendezvous = self._rendezvous, None
        if rendezvous is not None:
            nodes = rendezvous.hold(store, is_server, self._note)
            is_complete = len(nodes) == self._num_machines  # else ranks do not know: some may still come
            if is_complete:
                os.environ[RANKS_OF_HOST] = ",".join(str(node.num_ranks) for node in nodes)
            if self._when_met is not None:
                num_ranks = sum(node.num_ranks for node in nodes) if is_complete else 0
                self._when_met(store, rendezvous.job, num_ranks)

    def _place(self, host_name: str) -> str | None:
        """Return the address to listen on; None: all addresses."""
        addresses = addresses_here(host_name)
        if self._num_machines == 1:
            return next(iter(addresses), LOOPBACK)
        outside = [address for address in addresses if not is_loopback(address)]
        if outside:
            return outside[0]
        if not self._has_told:
            self._has_told = True
            self._note(
                f"the job's store listens on every interface, because {host_name} is no address of this machine's "
                "network; name one with --rdzv-endpoint or --local-addr. `paceline explain listens on every interface`."
            )
        return None


def addresses_here(host_name: str) -> list[str]:
    """Return the addresses behind a name that are this machine's own, IPv4 first."""
    with contextlib.suppress(OSError):
        return [address for address in addresses_of(host_name or LOOPBACK) if _is_mine(address)]
    return []


def _is_mine(address: str) -> bool:
    listener = _listen(address, 0)
    if listener is not None:
        listener.close()
    return listener is not None


def _listen(address: str, port: int) -> socket.socket | None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=_BACKLOG)
    except OSError:
        return None
