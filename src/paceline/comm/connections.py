"""The connections of one membership. A rank that is told to leave shuts them, so that every wait on them raises.

Rules
1. Gloo has no way to be interrupted: its `abort` does nothing, and a wait lasts to the group's timeout. What wakes it
   is the end of its sockets. So these are shut, and nothing else of the process: not those that were open before.
2. Never a socket that listens: Gloo ends the process (`std::terminate`). Only those with a peer.
3. Once is not enough. A rank that is still connecting opens further ones. So they are shut again and again until
   the rank's main thread has noticed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")


def connected() -> frozenset[int]:
    """Return the inodes of this process's sockets that have a peer on a network (not AF_UNIX)."""
    return frozenset(inode for inode, _ in _ends())


def shut(chosen: frozenset[int] | None, spared: frozenset[int]) -> int:
    """Shut connected sockets: those `chosen`, or all (None) but those `spared`. Returns how many."""
    count = 0
    for inode, end in _ends():
        if inode not in spared and (chosen is None or inode in chosen):
            with contextlib.suppress(OSError):  # its peer was first
                end.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def to_port(port: int) -> frozenset[int]:
    """Return the inodes of the connected sockets whose peer has this port."""
    found = set()
    for inode, end in _ends():
        with contextlib.suppress(OSError):
            if end.getpeername()[1] == port:
                found.add(inode)
    return frozenset(found)


def _ends() -> Iterator[tuple[int, socket.socket]]:
    """Yield each connected socket with its inode, by a descriptor of its own: the number may get another file.

    In a recovery this is done again and again. With paths and links instead of numbers it took three times as long.
    """
    for number in map(int, os.listdir(_DESCRIPTORS)):  # noqa: PTH208  numbers, not paths
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            end = socket.socket(fileno=os.dup(number))
        except OSError:
            continue
        with end:
            if end.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            try:
                end.getpeername()  # rule 2
            except OSError:
                continue
            yield os.fstat(end.fileno()).st_ino, end
