"""Counters of all TCP connections that this process holds: the kernel's `TCP_INFO`.

Each rank's file says its own addresses: readers match them, and nothing is exchanged.
`tcpi_delivery_rate` is not read: a measurement found it the same on links of 20 and of 200 Mbit/s.

No counter says which direction of a link is slow, as acknowledgements wait in the same queue. The arrival of data
within a collective says it. On a slow link data arrive slowly and all the time; on others, which wait for it, fast and
with breaks. So a thread looks, a millisecond apart.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterator

from paceline.observe.run_records import LinkCounters

_MOST = 64  # connections that are looked at
_SIZE = 232
# Offsets within struct tcp_info (linux/tcp.h): 32-bit, then 64-bit fields.
_RTT_US, _TOTAL_RETRANS, _MIN_RTT_US = 68, 100, 148
_BYTES_ACKED, _BYTES_RECEIVED, _BUSY_US = 120, 128, 168
_ESTABLISHED = 1
# Looks at what has arrived: how long they are apart, how many follow each other, fewer if so many see nothing; the
# break after them, and once so many that saw something are kept; for how long after the counters were asked for
_APART_S, _LOOKS, _QUIET = 0.001, 40, 10
_BREAK_S, _LATER_BREAK_S, _KEPT, _WATCHED_S = 0.18, 2.0, 256, 30.0
_FEWEST = 8  # looks that say a rate


class PeerSockets:
    """The descriptors of this process's connections. It holds none of them open."""

    def __init__(self) -> None:
        self._ends: dict[int, tuple[str, str]] = {}
        # By their ends, of the last looks that saw something: the bytes, and seconds since the look before if that did.
        self._arrivals: dict[tuple[str, str], deque[tuple[int, float]]] = {}
        self._asked_s = 0.0
        self._is_watched = False

    def watch(self) -> None:
        """Begin to watch how fast data arrive from other hosts, as long as counters are asked for."""
        if not self._is_watched and any(map(_crosses_hosts, self._ends.values())):
            self._is_watched = True
            threading.Thread(target=_watch, args=(weakref.ref(self),), daemon=True).start()

    def look_at_arrivals(self) -> None:
        """Look each millisecond at what has arrived, for 40 ms, or until nothing does. Asleep in between."""
        watched = [(file, ends) for file, ends in list(self._ends.items()) if _crosses_hosts(ends)]
        if not watched or time.monotonic() - self._asked_s > _WATCHED_S:
            return
        before, before_s = [_arrived(file) for file, _ in watched], time.perf_counter()
        arrives: dict[tuple[str, str], bool] = {}  # whether the look before saw something
        num_quiet = 0
        for _ in range(_LOOKS):
            time.sleep(_APART_S)
            now, now_s = [_arrived(file) for file, _ in watched], time.perf_counter()
            num_quiet = num_quiet + 1 if now == before else 0
            for (_, ends), first, last in zip(watched, before, now, strict=True):
                if last > first and ends in arrives:  # otherwise its beginning is unknown
                    # Of looks in a row the first counts for nothing: in the mean, its part and the last one's make one.
                    kept = self._arrivals.setdefault(ends, deque(maxlen=_KEPT))
                    kept.append((last - first, now_s - before_s if arrives[ends] else 0.0))
                arrives[ends] = last > first
            if num_quiet == _QUIET:
                return
            before, before_s = now, now_s

    @property
    def knows_arrivals(self) -> bool:
        """Return whether it has looked often enough to look more seldom."""
        return any(len(kept) == _KEPT for kept in self._arrivals.values())

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
        """Return what each connection has counted since it was made."""
        self._asked_s = time.monotonic()
        asked = (
            _counters(file, *ends, _rate(self._arrivals.get(ends, ()))) for file, ends in self._ends.items()
        )
        return tuple(counters for counters in asked if counters is not None)


def _watch(sockets: weakref.ref[PeerSockets]) -> None:
    while (found := sockets()) is not None:
        found.look_at_arrivals()
        break_s = _LATER_BREAK_S if found.knows_arrivals else _BREAK_S
        del found
        time.sleep(break_s)


def _rate(arrivals: Collection[tuple[int, float]]) -> float:
    """Return the bytes per second while data arrive; 0 after too few looks."""
    busy_s = sum(seconds for _, seconds in arrivals)
    return sum(size for size, _ in arrivals) / busy_s if len(arrivals) >= _FEWEST and busy_s else 0.0


def _crosses_hosts(ends: tuple[str, str]) -> bool:
    return ends[0].rpartition(":")[0] != ends[1].rpartition(":")[0]


def _ends(file: int) -> tuple[str, str] | None:
    """Return both addresses of an open TCP connection; None for anything else."""
    with contextlib.suppress(OSError), _borrowed(file) as found:
        if found.family in {socket.AF_INET, socket.AF_INET6} and found.type == socket.SOCK_STREAM:
            return _words(found.getsockname()), _words(found.getpeername())
    return None


@contextlib.contextmanager
def _borrowed(file: int, family: int = -1, kind: int = -1, protocol: int = -1) -> Iterator[socket.socket]:
    found = socket.socket(family, kind, protocol, fileno=file)
    try:
        yield found
    finally:
        found.detach()  # it stays its owner's


def _words(address: tuple[str, int]) -> str:
    host = address[0].removeprefix("::ffff:")  # an IPv4 address seen through an IPv6 socket
    return f"{host}:{address[1]}"


def _info(file: int) -> bytes:
    """Return a connection's `struct tcp_info`; empty if it is closed."""
    with contextlib.suppress(OSError), _borrowed(file, socket.AF_INET, socket.SOCK_STREAM, 0) as found:
        info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
        if len(info) >= _BUSY_US + 8 and info[0] == _ESTABLISHED:
            return info
    return b""


def _arrived(file: int) -> int:
    info = _info(file)
    return int(struct.unpack_from("Q", info, _BYTES_RECEIVED)[0]) if info else 0


def _counters(file: int, local: str, remote: str, arrival_bytes_per_s: float) -> LinkCounters | None:
    info = _info(file)
    if not info:
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
        arrival_bytes_per_s=arrival_bytes_per_s,
    )
