"""Whether a silent peer's port is closed: then its host's kernel says so, by ICMP."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection, Sequence

_EVERY_US = 250_000
_REFUSALS = 3  # a single one may be an accident


class ClosedPorts:
    """Asks silent peers' hosts, by empty datagrams from ports of their own, which peers drop as a stranger's.

    Limits first: a host that is down, cut off, or says nothing (a firewall) tells nothing.

    Args:
        places: Of all peers: address and port.
    """

    def __init__(self, places: Sequence[tuple[str, int]]) -> None:
        self._places = places
        self._asking: dict[int, socket.socket] = {}
        self._refused: dict[int, int] = {}
        self._asked_us = 0

    def find(self, silent: Collection[int], now_us: int) -> int | None:
        """Ask the silent ones, unless it was done just now; a peer of which it is known that its port is closed."""
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
        return None

    def _ask(self, peer: int) -> None:
        """Raises what the host has answered to the last question."""
        if peer not in self._asking:
            asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            asking.connect(self._places[peer])
            self._asking[peer] = asking
        with contextlib.suppress(BlockingIOError):
            self._asking[peer].recvfrom(1)
        self._asking[peer].sendall(b"")

    def close(self) -> None:
        for asking in self._asking.values():
            asking.close()
        self._asking.clear()
