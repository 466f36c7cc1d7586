"""The process at the other end of a Unix socket, which this process has not started: is it alive, how did it end?

Three sources, best first, because kernels and containers differ:
1. The socket option SO_PEERPIDFD (Linux 6.5) names the process itself, whatever process has its number later.
2. `pidfd_open` (Linux 5.3) of the number in SO_PEERCRED. The number is 0 if the process is in another container.
3. The connection: it is closed when the process ends. Forked children of the process have to close their copy.

The exit code comes from the pidfd (Linux 6.15), else from what /proc showed while the process ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import struct

from paceline.elastic.guest import credentials_of_peer
from paceline.host.processes import GONE, Vitals, VitalSigns

_SO_PEERPIDFD = 77
_PIDFD_GET_INFO, _INFO_EXIT, _INFO_BYTES = 0xC000FF0B | 64 << 16, 8, 64
_EXIT_CODE_AT = 60  # in the kernel's struct pidfd_info


def peer_pidfd(end: socket.socket) -> int | None:
    """Return a pidfd of the process at the other end; None before Linux 6.5."""
    with contextlib.suppress(OSError):
        return int(struct.unpack("i", end.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4))[0])
    return None


def pidfd_of(pid: int) -> int | None:
    """Return a pidfd of the process with this number; None before Linux 5.3, and for 0."""
    with contextlib.suppress(OSError):
        return os.pidfd_open(pid) if pid > 0 else None
    return None


def exit_status_by_pidfd(pidfd: int) -> int | None:
    """Return the wait status of a process that was reaped; None before Linux 6.15, and before it was reaped."""
    words = bytearray(struct.pack("Q", _INFO_EXIT) + bytes(_INFO_BYTES - 8))
    with contextlib.suppress(OSError):
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, words)
        if struct.unpack_from("Q", words)[0] & _INFO_EXIT:
            return int(struct.unpack_from("i", words, _EXIT_CODE_AT)[0])
    return None


class PeerProcess:
    """The process that has opened the other end of `end`, a connected Unix socket. `pid` is 0 if it is unknown."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.pid = credentials_of_peer(end)[0]
        pidfd = peer_pidfd(end)
        self.pidfd = pidfd_of(self.pid) if pidfd is None else pidfd
        self._signs: VitalSigns | None = None
        with contextlib.suppress(OSError):  # it has ended already, or is in another container
            self._signs = VitalSigns(self.pid)
        if pidfd is None and self._is_closed():  # the number may be another process's by now
            self._drop_pidfd()

    def vitals(self) -> Vitals:
        """Return its state. A process of which the kernel says nothing lives as long as the connection."""
        if self._signs is not None:
            return self._signs.look()
        is_gone = self.has_ended()
        return Vitals(GONE if is_gone else "", is_gone, cpu_ticks=0)

    def has_ended(self) -> bool:
        if self._signs is not None:
            self._signs.look()  # its exit code shows until its parent has reaped it
        if self.pidfd is None:
            return self._is_closed()
        return bool(select.select([self.pidfd], [], [], 0)[0])

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process alone: its group may be its engine's."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.pidfd is not None:
                signal.pidfd_send_signal(self.pidfd, number)

    def wait(self, limit_s: float) -> int | None:
        """Wait until it has ended, and return its exit code, negative for a signal; None if the kernel says none."""
        if self.pidfd is not None:
            select.select([self.pidfd], [], [], limit_s)
            status = exit_status_by_pidfd(self.pidfd)
            if status is not None:
                return os.waitstatus_to_exitcode(status)
        status = None if self._signs is None else self._signs.exit_status()
        return None if status is None else os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        self._drop_pidfd()
        if self._signs is not None:
            self._signs.close()

    def _drop_pidfd(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None

    def _is_closed(self) -> bool:
        try:
            return self._end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True
