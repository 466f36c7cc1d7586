"""Futexes: sleeping in the kernel until a 32-bit word in shared memory changes, and waking the sleepers (futex(2))."""

from __future__ import annotations

import ctypes
import platform
import sys
import threading

_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
_WAIT, _WAKE = 0, 1  # without FUTEX_PRIVATE_FLAG: the word is shared between processes
_ALL_WAITERS = 2**31 - 1
_NUMBER = _NUMBERS.get(platform.machine())
IS_AVAILABLE = sys.platform == "linux" and _NUMBER is not None and sys.maxsize > 2**32

_libc = ctypes.CDLL(None)  # a call through it releases the interpreter's lock
_syscall = _libc.syscall
_syscall.argtypes = (  # so that numbers need not be wrapped at each call
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint32,
)
_KEEPS_NO_ORDER = platform.machine() != "x86_64"
_fence_lock = threading.Lock()


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


def wait_while(address: int, value: int, timeout_s: float) -> None:
    """Sleep while the word at `address` is `value`; returns when woken, on a signal, or after `timeout_s`."""
    limit = _TimeSpec(int(timeout_s), int(timeout_s % 1 * 1e9))
    _syscall(_NUMBER, address, _WAIT, value, ctypes.addressof(limit), None, 0)


def wake(address: int) -> None:
    """Wake all threads that wait for the word at `address`."""
    _syscall(_NUMBER, address, _WAKE, _ALL_WAITERS, None, None, 0)


def let_threads_run() -> None:
    """Let another thread of this process take the interpreter's lock: half a microsecond if none waits for it.

    The core is kept. On a busy machine `sched_yield` would give away a whole slice, 3 ms, again and again. A thread
    that sleeps on a futex is put first when woken. `time.sleep(0)` sets a timer, which the kernel may let be late by
    50 microseconds: as slow as sleeping.
    """
    _libc.getpid()


def fence() -> None:
    """Memory barrier: what was written so far is seen before what is written next. x86 keeps stores in order."""
    if _KEEPS_NO_ORDER:
        full_fence()


def full_fence() -> None:
    """Memory barrier: what was written is seen before anything is read.

    A lock's acquisition is one on x86; elsewhere its release followed by its acquisition.
    """
    with _fence_lock:
        pass
    if _KEEPS_NO_ORDER:
        with _fence_lock:
            pass
