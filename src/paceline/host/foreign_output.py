"""Writes a message to another process's standard error, which it is not able to write itself."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
from pathlib import Path

_SYS_PIDFD_GETFD = 438  # the same number on every architecture
_STDERR = 2
_PATIENCE_MS, _MOST_BYTES = 500, select.PIPE_BUF


def write_to_stderr_of(pids: list[int], text: str) -> int:
    """Write a text once to each reachable stderr of these processes that is not ours; returns to how many."""
    told = {_identity(f"/proc/self/fd/{_STDERR}")}
    num_told = 0
    for pid in pids:
        identity = _identity(f"/proc/{pid}/fd/{_STDERR}")
        if identity is None or identity in told:
            continue
        told.add(identity)
        with contextlib.suppress(OSError):
            _write(pid, text.encode())
            num_told += 1
    return num_told


def _identity(path: str) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = Path(path).stat()
        return found.st_dev, found.st_ino
    return None


def _write(pid: int, content: bytes) -> None:
    """Through the process's own open file, so that it goes on writing behind; else through one opened anew."""
    file = _duplicate(pid)
    if file is None:
        file = os.open(f"/proc/{pid}/fd/{_STDERR}", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
    try:
        looking = select.poll()
        looking.register(file, select.POLLOUT)
        if looking.poll(_PATIENCE_MS):  # a pipe without a reader would block here
            os.write(file, content[:_MOST_BYTES])
    finally:
        os.close(file)


def _duplicate(pid: int) -> int | None:
    """Duplicate that file into this process, if the kernel lets it trace the other (Linux 5.6)."""
    with contextlib.suppress(OSError, AttributeError):
        handle = os.pidfd_open(pid)
        try:
            found = int(ctypes.CDLL(None).syscall(_SYS_PIDFD_GETFD, handle, _STDERR, 0))
        finally:
            os.close(handle)
        return None if found < 0 else found
    return None
