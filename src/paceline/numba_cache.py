"""What numba keeps on disk: renewed when any file that is compiled in has changed, compiled by one process of a host.

numba itself looks at the file of the compiled function only, not at those of the functions that it calls and of the
constants that it uses; and with nothing on disk yet, every process of a host compiles the same functions at once.

Rules
1. A process that does not find a function for some types on disk takes a lock beside it, and looks again before it
   compiles: whoever waited loads what another compiled. What is on disk is loaded without a lock.
2. Locks are the kernel's, of a process (POSIX record locks): a process that ends, however it does, holds none.
3. Who compiles A and needs B for it waits for B while it holds A. That ends, as no function calls one that calls it.
4. Within a process numba's own lock comes first, so only one thread waits or compiles.
5. Who stores holds one more lock, of the function: numba picks the next free file by an index that it reads before and
   writes after, so two processes would store for different types in one file.
6. Nothing looks for garbage while numba compiles: it makes some million objects that last until the function is done,
   and each look passes through all that torch and others have imported. That was a fifth of the compiler's time.
7. What is needed next, a fork may compile meanwhile (`keep`, `meanwhile`): it stores that, and whoever needs it waits.
8. A process that is stopped while it compiles is not waited for beyond `_AT_MOST_S`, once.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import math
import os
import signal
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

_AT_MOST_S = 120.0  # the largest function takes some 12 s of a core; a host may have more ranks than cores
_LOOKS_EVERY_S = 0.02
_INDEX_BYTE = 1 << 32  # beyond every signature's

Stamp = tuple[tuple[str, int, int], ...]


def stamp_of(files: Iterable[Path]) -> Stamp:
    """What changes when one of these files does."""
    return tuple((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(set(files)))


def keep(function: Any, stamp: Stamp, meanwhile: Callable[[Any], Any] | None = None) -> None:
    """Let the code of a function made by `numba.njit(cache=True)` be stored for this stamp, once a host. Local.

    Args:
        function: Changed.
        stamp: What the code depends on.
        meanwhile: Called in a fork, with the types of the arguments, when this process begins to compile the function:
            calls others that will be needed.
    """
    with contextlib.suppress(AttributeError):  # another numba keeps it elsewhere: then as numba does it
        function._cache._cache_file._source_stamp = stamp
        _OneProcess(function, meanwhile)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Python's cyclic garbage collector is off; what others turned off stays off."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _in_a_fork(work: Callable[[Any], Any], signature: Any) -> None:
    """Begin `work` in a fork of this process, which says nothing; not at all where there is one core only."""
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2:
        return
    with warnings.catch_warnings():  # of other threads, which the fork has not: it waits for none of them
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            process = os.fork()
        except OSError:  # no memory, or no process more: then one after the other
            return
    if process:
        threading.Thread(target=os.waitpid, args=(process, 0), daemon=True).start()
        return
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(math.ceil(_AT_MOST_S))  # whatever it waits for, nobody waits longer for it
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        # Else a rank's connections would stay open in its fork, and peers miss the rank late if it dies meanwhile.
        for path in list(Path("/proc/self/fd").iterdir()):  # not all up to the limit, which may be a billion
            if int(path.name) > 2:
                with contextlib.suppress(OSError):  # the listing's own
                    os.close(int(path.name))
        work(signature)
    finally:
        os._exit(0)


class _OneProcess:
    """Stands between a function made by numba and its stored code: holds a lock from a miss to the end of compiling."""

    _waits = True  # until a wait was in vain

    def __init__(self, function: Any, meanwhile: Callable[[Any], Any] | None) -> None:
        from numba.core.compiler_lock import global_compiler_lock  # noqa: PLC0415  numba takes a while

        cache, self._threads = function._cache, global_compiler_lock
        self._make_folder, self._path = (
            cache._impl.locator.ensure_cache_path,
            Path(cache._cache_file._index_path),
        )
        self._lock: IO[bytes] | None = None
        self._meanwhile = meanwhile
        self._load, self._store, self._compile = cache.load_overload, cache.save_overload, function.compile
        cache.load_overload, cache.save_overload, function.compile = self.load, self.store, self.compile

    def compile(self, signature: Any) -> Any:
        """Load or compile; afterwards the lock is free, whatever happened."""
        with self._threads, _no_collection():
            try:
                return self._compile(signature)
            finally:
                self._release()

    def load(self, signature: Any, target: Any) -> Any:
        """What is on disk, perhaps after a wait for it; None: compile now, the lock is held where there can be one."""
        found = self._load(signature, target)
        if found is None and self._acquire(signature):
            found = self._load(signature, target)
            if found is None and self._meanwhile is not None:
                _in_a_fork(self._meanwhile, signature)
        return found

    def store(self, signature: Any, data: Any) -> None:
        """Keep what was compiled on disk; not at all where another process holds the index for too long."""
        if self._lock is None or self._wait_for(self._lock, _INDEX_BYTE):
            self._store(signature, data)

    def _acquire(self, signature: Any) -> bool:
        """Wait for whoever compiles this function for these types; False if nobody can be waited for."""
        if self._lock is not None:  # a function that calls itself
            return False
        try:
            self._make_folder()
            self._lock = self._path.with_suffix(".lock").open("ab")
        except OSError:  # nothing can be stored here
            return False
        return self._wait_for(self._lock, zlib.crc32(str(signature).encode()))  # a byte of an empty file each

    @staticmethod
    def _wait_for(lock: IO[bytes], byte: int) -> bool:
        until_s = time.monotonic() + _AT_MOST_S
        while _OneProcess._waits:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            except (BlockingIOError, PermissionError):  # somebody has it
                if time.monotonic() > until_s:
                    _OneProcess._waits = False
                time.sleep(_LOOKS_EVERY_S)
            except OSError:  # no locks on this file system, so nobody to wait for
                return True
            else:
                return True
        return False

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()  # which frees it
            self._lock = None
