"""`LossyLink`: sums of vectors over ranks by UDP, of which a bounded part may be lost; the socket and its thread.

Rules
1. The socket listens on one address of this host, and takes datagrams of this job's ranks only.
2. One thread owns the endpoint and the socket. Callers hand it vectors; it answers peers also while they compute.
3. After an error the link cannot be used any more: every sum under way, and every later one, raises it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from paceline.comm.rendezvous import Rendezvous
from paceline.errors import ConfigurationError, PeerLostError, ProtocolError
from paceline.host.exit import end_before_exit
from paceline.transports.bounded_loss import datagram_loop as loop
from paceline.transports.bounded_loss import endpoint_state as e
from paceline.transports.bounded_loss import system_calls as system
from paceline.transports.bounded_loss.datagram import payload_room
from paceline.transports.bounded_loss.endpoint import Endpoint
from paceline.transports.bounded_loss.key_agreement import KeyAgreement
from paceline.transports.lossy_transport import Bound, LossyTransport, Sum

_ROWS = 64
_SLICE_US = 100_000
_SILENCE_S = 20.0
_LINGER_S = 2.0
_SEND_BUFFER_BYTES = 1024 * 1024
_RECEIVE_BUFFER_BYTES = 4 * 1024 * 1024
_LEAST_RECEIVE_BUFFER_BYTES = 1024 * 1024
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_IP_MTU_DISCOVER, _IP_PMTUDISC_DO, _IP_RECVTOS = 10, 2, 13
_SIOCGIFADDR, _SIOCGIFMTU = 0x8915, 0x8921
_ECN_CAPABLE = 2


class LossyLink(LossyTransport):
    """This rank's end of a group of ranks that sum vectors by UDP.

    Limits first: Linux, IPv4. What is lost of one vector is lost for good: see `Bound`.

    Args:
        store: Used for this alone.
        rank: Of this process.
        num_ranks: How many take part.
        timeout: How long a rank waits for another to connect, and for a sum.
        address: Of this host, on which it listens; "" for that of `interface`.
        interface: A network interface, where there is no address.
        num_owners: As of `Endpoint`: 0, or how many ranks sum for all.

    Contract:
        Collective: making one, over these ranks.  Blocks: until every rank has come.

    Raises:
        ConfigurationError: There is no such interface, or it has no IPv4 address.
        PeerLostError: A rank did not come.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        num_ranks: int,
        timeout: timedelta,
        address: str = "",
        interface: str = "",
        num_owners: int = 0,
    ) -> None:
        super().__init__(rank, num_ranks)
        loop.compile_all()
        place = address or _address_of(interface)
        self._driver = _Driver(store, rank, num_ranks, timeout, place, num_owners)
        thread = threading.Thread(
            target=self._driver.run, name=f"paceline lossy link of rank {rank}", daemon=True
        )
        self._driver.thread = thread
        self._let_go = weakref.finalize(self, self._driver.close, 0.0)
        end_before_exit(self, LossyLink.close)
        thread.start()

    def launch(self, vector: NDArray[Any], bound: Bound) -> Sum:
        """Start replacing `vector` by the sum over the ranks.

        Args:
            vector: Shape (N,), N > 0, float32 or float64, contiguous; mutated until the result is done.
            bound: What may be lost; the same on every rank.

        Contract:
            Collective: every rank, same order, the same N and dtype.  Blocks: no.
        """
        if vector.dtype not in (np.float32, np.float64) or not vector.flags.c_contiguous or vector.ndim != 1:
            raise ConfigurationError(
                f"a vector to be summed is one-dimensional, contiguous, float32 or float64, not {vector.dtype} of "
                f"shape {vector.shape}."
            )
        launched = Sum(vector, bound)
        self._driver.submit(launched)
        return launched

    @property
    def counters(self) -> dict[str, int]:
        n = self._driver.endpoint.tables.numbers
        names = {
            "sent": e.SENT,
            "repeated": e.REPEATED,
            "strangers": e.STRANGERS,
            "duplicates": e.DUPLICATES,
            "replayed": e.REPLAYED,
            "stale": e.STALE,
            "marked": e.MARKED,
        }
        return {name: int(n[column]) for name, column in names.items()}

    @property
    def place(self) -> tuple[str, int]:
        """The address and port on which this rank listens."""
        return self._driver.place

    def close(self, timeout_s: float = _LINGER_S) -> bool:
        """End the thread, after peers have what they need of this rank; returns whether it has ended."""
        return self._driver.close(timeout_s)


class _Driver:
    """What the thread works on; the link itself may be collected."""

    thread: threading.Thread

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        num_ranks: int,
        timeout: timedelta,
        address: str,
        num_owners: int,
    ) -> None:
        self._rank = rank
        self._timeout_s = timeout.total_seconds()
        self._silence_s = min(self._timeout_s, _SILENCE_S)
        self._socket = _bind(address)
        self.place: tuple[str, int] = self._socket.getsockname()
        agreement = KeyAgreement()
        rendezvous = Rendezvous(store, rank, num_ranks, timeout, "connecting to sum gradients over UDP")
        card = {"place": self.place, "public": agreement.public, "mtu": _mtu_of(address)}
        rendezvous.publish("place", json.dumps(card))
        cards = [json.loads(words) for words in rendezvous.collect("place")]
        keys = {
            peer: agreement.secret_with(other["public"]) for peer, other in enumerate(cards) if peer != rank
        }
        payload = payload_room(min(int(other["mtu"]) for other in cards))
        silence_us = int(self._silence_s * 1e6)
        self.endpoint = Endpoint(rank, num_ranks, keys, payload, silence_us, num_owners)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._io = loop.new_io(
            self._socket.fileno(),
            self._wake,
            _ROWS,
            self.endpoint.row_bytes,
            _socket_addresses([other["place"] for other in cards]),
            system.MOST_SEGMENTS,
        )
        self._places = [other["place"] for other in cards]
        self._queue: deque[Sum] = deque()
        self._under_way: dict[int, Sum] = {}
        self._lock = threading.Lock()
        self._is_closing = False
        self._failure: Exception | None = None

    def submit(self, launched: Sum) -> None:
        with self._lock:
            if self._failure is None and self._is_closing:
                self._failure = ProtocolError(f"rank {self._rank}'s link was closed; make a new one.")
            if self._failure is None:
                self._queue.append(launched)
                os.eventfd_write(self._wake, 1)
                return
        launched.end(None, self._failure)

    def close(self, timeout_s: float) -> bool:
        with self._lock:
            if not self._is_closing:
                self._is_closing = True
                os.eventfd_write(self._wake, 1)
        if self.thread is not threading.current_thread():
            self.thread.join(timeout_s)
        return not self.thread.is_alive()

    def run(self) -> None:
        """The thread: drive the datagrams, begin what was launched, end what is finished."""
        try:
            self._run()
        except Exception as error:  # noqa: BLE001  whatever it is, it is raised for those who wait
            self._fail(error)
        with self._lock:
            self._is_closing = True
            self._socket.close()
            os.close(self._wake)

    def _run(self) -> None:
        closed_s: float | None = None
        while True:
            self._begin_launched()
            why = loop.drive(self.endpoint.tables, self._io, _SLICE_US)
            if why == loop.CALLED:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            self.endpoint.go_on(time.monotonic_ns() // 1000)
            self._end_finished()
            if why == loop.FAILED:
                raise self._too_long()
            self._raise_if_lost()
            if self._is_closing:
                closed_s = closed_s or time.monotonic()
                is_needed = self._under_way or self._queue or not self.endpoint.is_idle
                if not is_needed or time.monotonic() - closed_s > _LINGER_S:
                    self._fail(ProtocolError(f"rank {self._rank}'s link was closed; make a new one."))
                    return

    def _begin_launched(self) -> None:
        while self._queue and self.endpoint.can_begin:
            launched = self._queue.popleft()
            number = self.endpoint.begin(launched.vector, launched.bound, time.monotonic_ns() // 1000)
            self._under_way[number] = launched

    def _end_finished(self) -> None:
        if not self._under_way:
            return
        for finished in self.endpoint.take_finished():
            self._under_way.pop(finished.collective).end(finished)

    def _raise_if_lost(self) -> None:
        if not self._under_way:
            return
        misfit = self.endpoint.misfit_peer
        if misfit is not None:
            raise ProtocolError(
                f"rank {self._rank} and rank {misfit} sum vectors of different lengths. Every rank launches the same "
                "sums in the same order; another model, or another bucket size, on one of them causes this."
            )
        stuck = self.endpoint.stuck_peer
        if stuck is not None:
            raise PeerLostError(
                f"rank {self._rank} hears rank {stuck} ({self._places[stuck][0]}), but none of its datagrams of "
                f"{self.endpoint.row_bytes + 28} bytes got there for {self._silence_s:g} s: a router between them "
                "drops what is longer than its MTU, silently. Set the smallest MTU of the path on every host, for "
                "example: ip link set dev eth0 mtu 1400.",
                stuck,
            )
        lost, waited_s = self.endpoint.lost_peer, self._silence_s
        oldest = min(self._under_way)
        if lost is None and time.monotonic() - self._under_way[oldest].launched_s > self._timeout_s:
            lost, waited_s = self._awaited(oldest), self._timeout_s
        if lost is not None:
            address, port = self._places[lost]
            never = (
                ""
                if self.endpoint.tables.peers[lost, e.P_RX_LARGEST] >= 0
                else (
                    " No datagram of its gradients ever came: if it is running, a firewall may keep UDP from passing."
                )
            )
            raise PeerLostError(
                f"rank {self._rank} heard nothing that it needs from rank {lost} ({address} port {port}) for "
                f"{waited_s:g} s.{never}",
                lost,
            )

    def _awaited(self, collective: int) -> int:
        """The first peer whose part of a collective is not here."""
        incoming = self.endpoint.tables.incoming[collective % e.SLOTS]
        for phase in range(2):
            for peer in range(self.endpoint.num_ranks):
                if peer != self._rank and not incoming[phase, peer, e.I_DONE]:
                    return peer
        return (self._rank + 1) % self.endpoint.num_ranks

    def _too_long(self) -> Exception:
        return ConfigurationError(
            f"datagrams of {self.endpoint.row_bytes + 28} bytes do not fit into the path from rank {self._rank}: the "
            "interface's MTU is larger than the network's. Lower it (ip link set dev eth0 mtu 1500) on every host."
        )

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._failure = self._failure or error
            waiting = [*self._under_way.values(), *self._queue]
            self._under_way.clear()
            self._queue.clear()
        for launched in waiting:
            launched.end(None, error)


def _bind(address: str) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, _ECN_CAPABLE)
        made.setsockopt(socket.IPPROTO_IP, _IP_RECVTOS, 1)
        made.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_DO)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        with contextlib.suppress(PermissionError):
            made.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _SEND_BUFFER_BYTES)
            made.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BUFFER_BYTES)
        got = made.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        if got < _LEAST_RECEIVE_BUFFER_BYTES:
            warnings.warn(
                f"the kernel gives a socket {got // 1024} KiB to receive into, so bursts from several ranks overflow "
                "it and count as lost. Raise it on every host: sysctl -w net.core.rmem_max=4194304.",
                UserWarning,
                stacklevel=2,
            )
        made.bind((address, 0))
    except OSError as error:
        made.close()
        raise ConfigurationError(
            f"no UDP socket can listen on {address}: {error}. Set GLOO_SOCKET_IFNAME to the interface that the other "
            "hosts reach."
        ) from error
    return made


def _socket_addresses(places: Sequence[tuple[str, int]]) -> NDArray[np.int64]:
    """A sockaddr_in a peer, shape (P, 2)."""
    raw = b"".join(
        struct.pack("=H", socket.AF_INET) + struct.pack(">H", port) + socket.inet_aton(address) + bytes(8)
        for address, port in places
    )
    found: NDArray[np.int64] = np.frombuffer(raw, np.int64).reshape(-1, 2).copy()
    return found


def _address_of(interface: str) -> str:
    """The IPv4 address of an interface."""
    names = [name for _, name in socket.if_nameindex()]
    for name in interface.split(","):
        if name not in names:
            raise ConfigurationError(
                f"there is no interface {name!r} on this host; there are {', '.join(names)}."
            )
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError as error:
                raise ConfigurationError(f"the interface {name!r} has no IPv4 address: {error}.") from error
            return socket.inet_ntoa(answer[20:24])
    raise ConfigurationError("no interface was named.")


def _mtu_of(address: str) -> int:
    """The MTU of the interface that has this address; 1500 if none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                if socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]) == address:
                    return int(struct.unpack("=i", fcntl.ioctl(probe, _SIOCGIFMTU, request)[16:20])[0])
    return 1500
