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
8. In a block of `without_waiting` a fork compiles, and what stands in for the code is called until it is there. Only
   in the first such block that needs the code: who comes again at once comes often, or measures, and waits.
9. A process that is stopped while it compiles is not waited for beyond `_AT_MOST_S`, once.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import itertools
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
WAITING = "paceline:waiting"  # the event, among numba's, that this process waits for one that compiles
_INDEX_BYTE = 1 << 32  # beyond every signature's

Stamp = tuple[tuple[str, int, int], ...]


def stamp_of(files: Iterable[Path]) -> Stamp:
    """What changes when one of these files does."""
    return tuple((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(set(files)))


def keep(
    function: Any,
    stamp: Stamp,
    meanwhile: Callable[[Any], Any] | None = None,
    stand_in: Callable[[Callable[[], bool]], Callable[..., Any] | None] | None = None,
) -> None:
    """Let the code of a function made by `numba.njit(cache=True)` be stored for this stamp, once a host. Local.

    Args:
        function: Changed.
        stamp: What the code depends on.
        meanwhile: Called in a fork, with the types of the arguments, when this process begins to compile the function:
            calls others that will be needed.
        stand_in: Returns what is called instead where nobody waits (rule 8), or None; passed what says whether the code
            is there.
    """
    with contextlib.suppress(AttributeError):  # another numba keeps it elsewhere: then as numba does it
        function._cache._cache_file._source_stamp = stamp
        _OneProcess(function, meanwhile, stand_in)


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


class Waits:
    """Whether this process waits for the compiler.

    Attributes:
        always: How many blocks of `waiting` it is in.
        block: Number of the block of `without_waiting` that it is in, or 0.
        blocks: For the next ones.
        num_not: Functions that it did not wait for.
        lock: Of these, as blocks of several threads overlap.
    """

    always = 0
    block = 0
    blocks = itertools.count(1)
    num_not = 0
    lock = threading.Lock()


@contextlib.contextmanager
def without_waiting(*, really: bool = True) -> Iterator[None]:
    """What this process calls in here and has something to stand in is compiled by a fork (rule 8). Local."""
    with Waits.lock:
        begins = (
            really and not Waits.block and not Waits.always
        )  # another thread's block may end before this one does
        if begins:
            Waits.block = next(Waits.blocks)
    try:
        yield
    finally:
        if begins:
            Waits.block = 0


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """All that is called in here and has to be compiled is waited for, whatever `without_waiting` says. Local."""
    with Waits.lock:
        Waits.always += 1
    try:
        yield
    finally:
        with Waits.lock:
            Waits.always -= 1


def _in_a_fork(work: Callable[[Any], Any], signature: Any) -> threading.Thread | None:
    """Begin `work` in a fork of this process, which says nothing; not at all where there is one core only.

    Returns:
        A thread that ends when the fork does.
    """
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2:
        return None
    with warnings.catch_warnings():  # of other threads, which the fork has not: it waits for none of them
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            process = os.fork()
        except OSError:  # no memory, or no process more: then one after the other
            return None
    if process:
        waits = threading.Thread(target=_wait_for_end_of, args=(process,), daemon=True)
        waits.start()
        return waits
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


def _wait_for_end_of(process: int) -> None:
    # Gone already where the program waits for all of its children, or ignores SIGCHLD.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process, 0)


class _OneProcess:
    """Stands between a function made by numba and its stored code: holds a lock from a miss to the end of compiling."""

    _waits = True  # until a wait was in vain
    _fork: threading.Thread | None = None  # the last that this process made for what it does not wait for

    def __init__(
        self,
        function: Any,
        meanwhile: Callable[[Any], Any] | None,
        stand_in: Callable[[Callable[[], bool]], Callable[..., Any] | None] | None,
    ) -> None:
        from numba.core.compiler_lock import global_compiler_lock  # noqa: PLC0415  numba takes a while

        cache, self._threads = function._cache, global_compiler_lock
        self._make_folder, self._path = (
            cache._impl.locator.ensure_cache_path,
            Path(cache._cache_file._index_path),
        )
        self._lock: IO[bytes] | None = None
        self._meanwhile, self._stand_in = meanwhile, stand_in
        self._target = function.targetctx
        self._blocks: dict[Any, int] = {}  # in which each signature was first needed
        self._forks: dict[Any, threading.Thread | None] = {}  # for which signature
        self._found: dict[Any, Any] = {}  # loaded, and not handed out yet
        self._looked_s = 0.0
        self._load, self._store, self._compile = cache.load_overload, cache.save_overload, function.compile
        cache.load_overload, cache.save_overload, function.compile = self.load, self.store, self.compile

    def compile(self, signature: Any) -> Any:
        """Load or compile; afterwards the lock is free, whatever happened."""
        with self._threads, _no_collection():
            instead = self._instead(signature) if Waits.block else None
            if instead is not None:
                return instead
            try:
                return self._compile(signature)
            finally:
                self._release()

    def _instead(self, signature: Any) -> Callable[..., Any] | None:
        """What to call while a fork compiles; None: load or compile."""
        if self._stand_in is None or self._is_there(signature):
            return None
        instead = self._stand_in(functools.partial(self._is_there_by_now, signature))
        if instead is None:
            return None
        if self._blocks.setdefault(signature, Waits.block) != Waits.block:
            return None
        if signature not in self._forks:
            other = _OneProcess._fork
            if other is not None and other.is_alive():  # one at a time, or they take this process's core
                return instead
            self._forks[signature] = _OneProcess._fork = _in_a_fork(self._compile_as_fork, signature)
            Waits.num_not += _OneProcess._fork is not None
        fork = self._forks[signature]
        return instead if fork is not None and fork.is_alive() else None

    def _compile_as_fork(self, signature: Any) -> None:
        Waits.block = 0
        self.compile(signature)

    def _is_there(self, signature: Any) -> bool:
        """Whether it is on disk; if so, `load` returns it."""
        if signature not in self._found and (found := self._load(signature, self._target)) is not None:
            self._found[signature] = found
        return signature in self._found

    def _is_there_by_now(self, signature: Any) -> bool:
        """As `_is_there`, now and then; also once the fork for it has ended without it: then it is compiled here."""
        now_s, fork = time.monotonic(), self._forks.get(signature)
        if now_s - self._looked_s < _LOOKS_EVERY_S:
            return False
        self._looked_s = now_s
        has_ended = fork is not None and not fork.is_alive()
        with self._threads:
            return self._is_there(signature) or has_ended

    def load(self, signature: Any, target: Any) -> Any:
        """What is on disk, perhaps after a wait for it; None: compile now, the lock is held where there can be one."""
        found = self._found.pop(signature, None) or self._load(signature, target)
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
        byte = zlib.crc32(str(signature).encode())  # of an empty file, for each signature
        if self._wait_for(self._lock, byte, only_once=True):
            return True
        from numba.core import event  # noqa: PLC0415  as above

        with event.trigger_event(WAITING):
            return self._wait_for(self._lock, byte)

    @staticmethod
    def _wait_for(lock: IO[bytes], byte: int, *, only_once: bool = False) -> bool:
        """Whether the lock is held now: after a wait for it, unless it is tried once only."""
        until_s = time.monotonic() + _AT_MOST_S
        while _OneProcess._waits:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            except (BlockingIOError, PermissionError):  # somebody has it
                if only_once:
                    return False
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
