"""Counters of the TCP connections that this process holds, whoever opened them: the kernel's `TCP_INFO`.

Whose end the other one is, each rank's file says of itself: readers match addresses, and nothing is exchanged.
`tcpi_delivery_rate` is not read: a measurement found it the same on links of 20 and of 200 Mbit/s.
"""

from __future__ import annotations

import os
import socket
import struct

from paceline.observe.run_records import LinkCounters

_MOST = 64  # connections that are looked at
_SIZE = 232
# Offsets within struct tcp_info (linux/tcp.h): 32-bit, then 64-bit fields.
_RTT_US, _TOTAL_RETRANS, _MIN_RTT_US = 68, 100, 148
_BYTES_ACKED, _BYTES_RECEIVED, _BUSY_US = 120, 128, 168
_ESTABLISHED = 1


class PeerSockets:
    """Knows this process's connections by their descriptors, and holds none open: who closes one has closed it."""

    def __init__(self) -> None:
        self._ends: dict[int, tuple[str, str]] = {}

    def find(self) -> None:
        """Look for connections again: new ones may have been made."""
        self._ends = {}
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  half as long as iterdir
            try:
                is_socket = os.readlink(f"/proc/self/fd/{name}").startswith("socket:")  # noqa: PTH115  as above
            except OSError:
                continue
            if is_socket and len(self._ends) < _MOST:
                ends = _ends(int(name))
                if ends is not None and ends not in self._ends.values():
                    self._ends[int(name)] = ends

    def counters(self) -> tuple[LinkCounters, ...]:
        """What each of them has counted, since it was made."""
        asked = (_counters(file, *ends) for file, ends in self._ends.items())
        return tuple(counters for counters in asked if counters is not None)


def _ends(file: int) -> tuple[str, str] | None:
    """Addresses here and there of a TCP connection that is open; None of anything else."""
    try:
        found = socket.socket(fileno=file)
    except OSError:
        return None
    try:
        if found.family not in {socket.AF_INET, socket.AF_INET6} or found.type != socket.SOCK_STREAM:
            return None
        return _words(found.getsockname()), _words(found.getpeername())
    except OSError:
        return None
    finally:
        found.detach()  # it stays its owner's


def _words(address: tuple[str, int]) -> str:
    host = address[0].removeprefix("::ffff:")  # an IPv4 address seen through an IPv6 socket
    return f"{host}:{address[1]}"


def _counters(file: int, local: str, remote: str) -> LinkCounters | None:
    try:
        found = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=file)
    except OSError:
        return None
    try:
        info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
    except OSError:
        return None
    finally:
        found.detach()
    if len(info) < _BUSY_US + 8 or info[0] != _ESTABLISHED:
        return None

    def half(offset: int) -> int:
        return int(struct.unpack_from("I", info, offset)[0])

    def whole(offset: int) -> int:
        return int(struct.unpack_from("Q", info, offset)[0])

    return LinkCounters(
        local,
        remote,
        whole(_BYTES_ACKED),
        whole(_BYTES_RECEIVED),
        1e-6 * whole(_BUSY_US),
        half(_TOTAL_RETRANS),
        1e-6 * half(_RTT_US),
        1e-6 * half(_MIN_RTT_US),
    )
