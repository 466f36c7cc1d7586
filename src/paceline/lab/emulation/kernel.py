"""The Linux calls that Python's standard library lacks before 3.12; standard library only, no state."""

from __future__ import annotations

import ctypes
import os
import signal

NEW_USER = 0x10000000
NEW_NET = 0x40000000
NEW_MOUNT = 0x00020000
NEW_UTS = 0x04000000
NEW_IPC = 0x08000000
NEW_PID = 0x20000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
_PR_SET_PDEATHSIG, _PR_SET_TIMERSLACK, _MNT_DETACH = 1, 29, 2

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(kinds: int) -> None:
    """Leave this process's namespaces of these kinds for new ones."""
    _checked(_libc.unshare(kinds), "unshare")


def enter(namespace: int, kind: int) -> None:
    """Join the namespace behind an open file of /proc/PID/ns."""
    _checked(_libc.setns(namespace, kind), "setns")


def mount(source: str, target: str, kind: str = "", flags: int = 0) -> None:
    """Attach a file system or a bound path; without options."""
    result = _libc.mount(source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), None)
    _checked(result, f"mount {target}")


def detach(target: str) -> None:
    """Unmount what is mounted here, for later processes at once."""
    _checked(_libc.umount2(target.encode(), _MNT_DETACH), f"umount {target}")


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however it ends."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0), "prctl")
    if os.getppid() not in (parent, 0):  # it ended before we asked; 0: it is outside our process namespace
        os.kill(os.getpid(), signal.SIGKILL)


def sleep_exactly() -> None:
    """Have timers of this process fire when they are due; the kernel may otherwise be 50 us late."""
    _checked(_libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0), "prctl")


def _checked(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
