"""`LinkThread`: the thread that owns a socket and an endpoint, and drives the datagrams between them.

Rules
1. The socket listens on one address of this host, and takes datagrams of this job's ranks only.
2. Only this thread touches the endpoint. It answers peers also while the callers compute.
3. After an error the link cannot be used any more. All sums under way, and all later ones, raise it.
4. The user's timeout is the only one, so a network that fails for less is ridden out. Two errors are raised earlier: a
   peer's kernel answers that its port is closed (`ClosedPorts`), or no full-size datagram has ever reached a peer.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from paceline.errors import ConfigurationError, PeerLostError, ProtocolError
from paceline_lossy.datagrams import datagram_loop as loop
from paceline_lossy.datagrams import endpoint_state as e
from paceline_lossy.datagrams import system_calls as system
from paceline_lossy.datagrams.datagram_end import DatagramEnd
from paceline_lossy.datagrams.udp_socket import Members, dropped_by_kernel, socket_addresses

_ROWS = 64
_SLICE_US = 100_000
_NEVER_S = (
    20.0  # after this time without any full-size datagram reaching a peer that is heard, it counts as stuck
)
LINGER_S = 2.0
_EVERY_US = 250_000
_REFUSALS = 3  # a single refusal may be an accident


class ClosedPorts:
    """Finds silent peers whose port is closed: the kernel of the peer's host answers by ICMP.

    Limits first: a host that is down, cut off or behind a firewall answers nothing. The question is an empty datagram
    from a separate port, which a living peer drops as a stranger's.

    Args:
        places: Address and port of each peer.
    """

    def __init__(self, places: Sequence[tuple[str, int]]) -> None:
        self._places = places
        self._asking: dict[int, socket.socket] = {}
        self._refused: dict[int, int] = {}
        self._asked_us = 0

    def find(self, silent: Collection[int], now_us: int) -> int | None:
        """Ask the silent peers, unless they were asked just now. Return one whose port is known to be closed."""
        for peer in set(self._asking) - set(silent):
            self._asking.pop(peer).close()
            self._refused.pop(peer, None)
        if not silent or now_us - self._asked_us < _EVERY_US:
            return None
        self._asked_us = now_us
        for peer in silent:
            try:
                self._ask(peer)
            except ConnectionRefusedError:
                self._refused[peer] = self._refused.get(peer, 0) + 1
                if self._refused[peer] >= _REFUSALS:
                    return peer
            except OSError:  # there is no way to its host now; the network may come back (rule 4)
                self._asking.pop(peer).close()
        return None

    def _ask(self, peer: int) -> None:
        """Ask a peer's host again. Raises its answer to the last question."""
        if peer not in self._asking:
            self._asking[peer] = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            self._asking[peer].connect(self._places[peer])
        with contextlib.suppress(BlockingIOError):
            self._asking[peer].recvfrom(1)
        self._asking[peer].sendall(b"")

    def close(self) -> None:
        for asking in self._asking.values():
            asking.close()
        self._asking.clear()


class LinkThread(ABC):
    """The work of the thread. Subclasses say what is begun, and what happens when it ends.

    Args:
        endpoint: The endpoint of this rank.
        members: This rank's sockets, and the addresses and keys of the others.
        timeout_s: How long a sum or a message may be under way.
        name: The name of the thread.
    """

    def __init__(self, endpoint: DatagramEnd, members: Members, timeout_s: float, name: str) -> None:
        self.end = endpoint
        self.place: tuple[str, int] = members.sockets[0].getsockname()
        self._rank = endpoint.rank
        self._timeout_s = timeout_s
        self._members = members
        self._sockets = members.sockets
        self._socket = members.sockets[0]
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._io = loop.new_io(
            [each.fileno() for each in members.sockets],
            self._wake,
            _ROWS,
            endpoint.row_bytes,
            socket_addresses(members.places),
            system.MOST_SEGMENTS,
        )
        self._lock = threading.RLock()
        self._is_closing = self._are_closed = False
        self._came_to_senders = 0
        self._failure: Exception | None = None
        self._closed_ports = ClosedPorts(members.places)
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def _begin(self) -> None:
        """Let the endpoint begin what was submitted, as far as there is room. Runs on the thread."""

    @abstractmethod
    def _end(self) -> None:
        """Complete what the endpoint has finished. Runs on the thread."""

    @abstractmethod
    def _is_under_way(self) -> bool:
        """Return whether anything submitted has not ended. Runs on the thread."""

    @abstractmethod
    def _check(self) -> None:
        """Raise the errors that only this kind of link has. Runs on the thread."""

    @abstractmethod
    def _give_up(self, error: Exception) -> None:
        """End everything submitted with this error."""

    @property
    def counters(self) -> dict[str, int]:
        """Return counts of datagrams: sent, repeated, of strangers, duplicates, replayed, of ended sums, marked."""
        n = self.end.tables.numbers
        names = {
            "sent": e.SENT,
            "repeated": e.REPEATED,
            "strangers": e.STRANGERS,
            "duplicates": e.DUPLICATES,
            "replayed": e.REPLAYED,
            "stale": e.STALE,
            "marked": e.MARKED,
        }
        found = {name: int(n[column]) for name, column in names.items()}
        with self._lock:
            found["strangers"] += self._num_at_senders()
        return found

    def _num_at_senders(self) -> int:
        """Return how many datagrams came to the ports that only send. The caller holds the lock."""
        if not self._are_closed:
            self._came_to_senders = sum(map(dropped_by_kernel, self._sockets[1:]))
        return self._came_to_senders

    def close(self, timeout_s: float) -> bool:
        """End the thread, after peers have what they need from this rank. Return whether it has ended."""
        with self._lock:
            if not self._is_closing:
                self._is_closing = True
                os.eventfd_write(self._wake, 1)
        if self.thread is not threading.current_thread():
            self.thread.join(timeout_s)
        return not self.thread.is_alive()

    @property
    def _name(self) -> str:
        return self._members.name_of(self._rank)

    def _usable(self) -> bool:
        """Return whether the link takes new work. The caller holds the lock."""
        if self._failure is None and self._is_closing:
            self._failure = self._closed()
        return self._failure is None

    def _run(self) -> None:
        """Drive the datagrams, begin what was submitted, end what is finished. The body of the thread."""
        try:
            self._drive()
        except Exception as error:  # noqa: BLE001  raised in the threads that wait
            self._fail(error)
        with self._lock:
            self._is_closing = True
            self._num_at_senders()
            self._are_closed = True
            self._closed_ports.close()
            for each in self._sockets:
                each.close()
            os.close(self._wake)

    def _drive(self) -> None:
        closed_s: float | None = None
        while True:
            self._begin()
            why = loop.drive(self.end.tables, self._io, _SLICE_US)
            if why == loop.CALLED:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            self.end.go_on(time.monotonic_ns() // 1000)
            self._end()
            if why == loop.FAILED:
                raise self._too_long()
            if self._is_under_way():
                self._raise_if_lost()
                self._check()
            if self._is_closing:
                closed_s = closed_s or time.monotonic()
                is_needed = self._is_under_way() or not self.end.is_idle
                if not is_needed or time.monotonic() - closed_s > LINGER_S:
                    self._fail(self._closed())
                    return

    def _raise_if_lost(self) -> None:
        now_us = time.monotonic_ns() // 1000
        gone = self._closed_ports.find(self.end.silent_peers(now_us), now_us)
        if gone is not None:
            address, port = self._members.places[gone]
            raise PeerLostError(
                f"{self._members.name_of(gone)} has gone: its host ({address}) answers {self._name} that "
                f"no process has its UDP port {port} any more. Its process has ended, or a firewall "
                "rejects UDP.",
                gone,
            )
        never_s = min(self._timeout_s, _NEVER_S)
        never = self.end.never_reached(now_us, int(never_s * 1e6))
        stuck, waited_s = (never, never_s) if never is not None else (self.end.stuck_peer, self._timeout_s)
        if stuck is not None:
            raise self._unreached(stuck, waited_s)
        if self.end.lost_peer is not None:
            raise self._unheard(self.end.lost_peer, self._timeout_s)

    def _unreached(self, peer: int, waited_s: float) -> PeerLostError:
        address, _ = self._members.places[peer]
        return PeerLostError(
            f"{self._name} hears {self._members.name_of(peer)} ({address}), but none of its datagrams "
            f"of {self.end.row_bytes + 28} bytes got there for {waited_s:g} s. A router between them silently drops "
            "packets that are longer than its MTU. Set the smallest MTU of the path on every host, for example: ip "
            "link set dev eth0 mtu 1400.",
            peer,
        )

    def _unheard(self, peer: int, waited_s: float) -> PeerLostError:
        address, port = self._members.places[peer]
        never = (
            ""
            if self.end.has_heard_chunks(peer)
            else " No datagram of its gradients ever came: if it is running, a firewall may keep UDP from passing."
        )
        return PeerLostError(
            f"{self._name} heard nothing that it needs from {self._members.name_of(peer)} ({address} port {port}) for "
            f"{waited_s:g} s.{never}",
            peer,
        )

    def _too_long(self) -> Exception:
        return ConfigurationError(
            f"datagrams of {self.end.row_bytes + 28} bytes do not fit into the path from {self._name}: the "
            "interface's MTU is larger than the network's. Lower it (ip link set dev eth0 mtu 1500) on every host."
        )

    def _closed(self) -> Exception:
        return ProtocolError(f"the link of {self._name} was closed; make a new one.")

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._failure = self._failure or error
        self._give_up(error)
