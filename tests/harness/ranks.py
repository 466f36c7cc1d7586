"""Real processes for tests: pools of ranks that stay up between tests, and jobs under torchrun.

Rules
1. A rank is a separate process in a Gloo group on the loopback interface. The rendezvous is a file in a temporary
   folder, or a TCP store on a port that the kernel chose.
2. A test names an importable function `fn(rank, num_ranks, *args)`, and every rank of the pool runs it. Its return
   value, its exception or its death comes back as an `Outcome`.
3. No wait is endless: the group has a timeout, and a run has a deadline. A rank that misses it is asked for its stack
   and then killed. Once only stopped ranks are left, they are killed at once.
4. A run that was not clean (an exception, a death, a miss) leaves nothing to the next one. The group is opened again,
   and after a death or a miss the processes are started again, too.
5. No process outlives a pool. Ranks die with their parent, and `close` raises `OrphanError` if one is left.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib.util
import inspect
import itertools
import multiprocessing as mp
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Self

from harness import start_guard, warm

GROUP_TIMEOUT_S = 30.0
DEADLINE_S = 60.0
STOPPED_CHECK_S = 0.5
_STACK = "(most recent call first)"  # of what faulthandler writes
LIMIT_S = 30.0  # for what is about to happen, on a busy machine
MARK = "PACELINE_TEST_MARK"
BACKEND = "PACELINE_TEST_BACKEND"  # which c10d backend the pools open; gloo by default
_PR_SET_PDEATHSIG = 1
_SPAWNER = mp.get_context(
    "forkserver"
)  # itself a fork of the server of `warm.py`, which has loaded all that is needed
_SPAWNER.set_forkserver_preload([])
# Tests leave groups open, and each of Gloo's wakes a thread 100 times a second: with 500 threads a rank that alone took
# 44 % of two cores. A rank with more threads than this is replaced.
_MOST_THREADS = 40


class RanksFailedError(AssertionError):
    """An error: a rank raised, died or missed the deadline. The message describes every rank's outcome."""


class OrphanError(AssertionError):
    """A process that a test started is still alive."""


@dataclass(frozen=True)
class RankError:
    """An exception that a rank's function raised."""

    types: tuple[str, ...]
    """Qualified names of the exception's class and its bases, most derived first."""
    message: str
    stack: str

    def is_a(self, name: str) -> bool:
        """Return whether `name` (a class name, with or without its module) is among the exception's classes."""
        return any(name in (qualified, qualified.rpartition(".")[2]) for qualified in self.types)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one rank in one run: exactly one of value, error, died and missed is set."""

    rank: int
    value: Any = None
    error: RankError | None = None
    exit_code: int | None = None
    """Set if the process died: negative for a signal."""
    missed_deadline: bool = False
    log: str = field(default="", repr=False)
    num_threads: int = 0
    """After a clean run."""

    @property
    def clean(self) -> bool:
        """Return whether the function returned."""
        return self.error is None and self.exit_code is None and not self.missed_deadline

    def story(self) -> str:
        """Return a description of the outcome, for a failure message."""
        if self.error is not None:
            return f"rank {self.rank} raised {self.error.types[0]}: {self.error.message}\n{self.error.stack}"
        if self.exit_code is not None:
            return f"rank {self.rank} died with exit code {self.exit_code}; its log:\n{self.log}"
        if self.missed_deadline:
            return f"rank {self.rank} missed the deadline; its log:\n{self.log}"
        return f"rank {self.rank} returned {self.value!r:.200}"


@dataclass(frozen=True)
class _Start:
    """The settings of a rank's process, sent once."""

    rank: int
    num_ranks: int
    folder: str
    env: Mapping[str, str]


@dataclass(frozen=True)
class _Order:
    """One run: the function, its arguments, and the rendezvous (None keeps the open group)."""

    source: str
    module: str
    name: str
    args: tuple[Any, ...]
    rendezvous: str | None
    group_timeout_s: float


def as_torchrun_says(num_ranks: int) -> dict[str, str]:
    """Return the environment variables that torchrun gives every rank of one host."""
    return {"LOCAL_WORLD_SIZE": str(num_ranks), "WORLD_SIZE": str(num_ranks)}


def _log_path(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"rank{rank}.log"


def _is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process, so that waiting for it is pointless."""
    with contextlib.suppress(OSError):
        return "\nState:\tT" in Path(f"/proc/{pid}/status").read_text()
    return False


def _load(source: str, module: str) -> types.ModuleType:
    """Return the test module at path `source`, under any name by which pytest imported it."""
    known = sys.modules.get(module)
    if known is not None and getattr(known, "__file__", None) == source:
        return known
    spec = importlib.util.spec_from_file_location(module, source)
    if spec is None or spec.loader is None:
        raise ImportError(f"no module at {source}")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def _open_group(start: _Start, order: _Order) -> None:
    if order.rendezvous is None:
        return
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    kind, _, where = order.rendezvous.partition(":")
    timeout = timedelta(seconds=order.group_timeout_s)
    store: dist.Store
    if kind == "file":
        store = dist.FileStore(where, start.num_ranks)
    else:
        host, _, port = where.rpartition(":")
        store = dist.TCPStore(host, int(port), start.num_ranks, is_master=False, timeout=timeout)
    import paceline  # noqa: F401  registers the backend of that name

    dist.init_process_group(
        os.environ.get(BACKEND, "gloo"),
        store=store,
        rank=start.rank,
        world_size=start.num_ranks,
        timeout=timeout,
    )


def _die_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _rank_main(start: _Start, orders: Connection) -> None:
    """Run a rank's process: run orders until told to stop, or until the sender of orders has gone."""
    _die_with_parent()
    gc.freeze()  # a collection need not look at what the server had loaded before it forked: half a million objects
    with _log_path(start.folder, start.rank).open("w", buffering=1) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        faulthandler.enable(log)
        faulthandler.register(signal.SIGUSR1, log, all_threads=True)
        os.environ.update(start.env)
        dist.set_debug_level_from_env()
        torch.set_num_threads(1)
        while True:
            try:
                order = orders.recv()
            except EOFError:
                break
            if order is None:
                break
            orders.send(_obey(start, order))
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        log.flush()
        os._exit(0)  # a broken group must not hold up the end


def _obey(start: _Start, order: _Order) -> Outcome:
    try:
        _open_group(start, order)
        function = getattr(_load(order.source, order.module), order.name)
        value = function(start.rank, start.num_ranks, *order.args)
        return Outcome(start.rank, value=value, num_threads=len(list(Path("/proc/self/task").iterdir())))
    except BaseException as error:
        names = tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__)
        outcome = Outcome(start.rank, error=RankError(names, str(error), traceback.format_exc()))
        # A traceback keeps its frames' models alive, whose group is about to be closed.
        traceback.clear_frames(error.__traceback__)
        return outcome


class Ranks:
    """A pool of `num_ranks` processes in one Gloo group, used by many tests one after another.

    Args:
        num_ranks: How many.
        group_timeout_s: The process group's timeout.
        env: Added to every rank's environment before the group opens.
        store: "file", or "tcp" for a TCP store kept by this process, as torchrun's agent keeps it.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        group_timeout_s: float = GROUP_TIMEOUT_S,
        env: Mapping[str, str] | None = None,
        store: str = "file",
    ) -> None:
        self.num_ranks = num_ranks
        self.group_timeout_s = group_timeout_s
        self.env = {
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            **as_torchrun_says(num_ranks),
            **(env or {}),
        }
        self.store = store
        self._folder = tempfile.mkdtemp(prefix="paceline-ranks-")
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._stores: list[dist.Store] = []
        self._serial = itertools.count()
        self._needs_group = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids, empty before the first run."""
        return [process.pid for process in self._processes]

    def run(self, fn: Callable[..., Any], *args: Any, deadline_s: float = DEADLINE_S) -> list[Any]:
        """Every rank's return value of `fn(rank, num_ranks, *args)`.

        Raises:
            RanksFailedError: a rank raised, died or missed the deadline.
        """
        outcomes = self.outcomes(fn, *args, deadline_s=deadline_s)
        if not all(outcome.clean for outcome in outcomes):
            raise RanksFailedError("\n\n".join(outcome.story() for outcome in outcomes))
        return [outcome.value for outcome in outcomes]

    def outcomes(self, fn: Callable[..., Any], *args: Any, deadline_s: float = DEADLINE_S) -> list[Outcome]:
        """Return the outcome of every rank, for tests that expect some to raise or die."""
        start_guard.note("processes", "ranks of a pool")
        self._start()
        order = _Order(
            source=str(Path(inspect.getfile(fn)).resolve()),
            module=fn.__module__,
            name=fn.__qualname__,
            args=args,
            rendezvous=self._rendezvous() if self._needs_group else None,
            group_timeout_s=self.group_timeout_s,
        )
        self._needs_group = True  # until this run proves clean
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(order)
        outcomes = self._collect(deadline_s)
        if all(outcome.clean for outcome in outcomes):
            self._needs_group = max(outcome.num_threads for outcome in outcomes) > _MOST_THREADS
            if self._needs_group:
                self._kill()
        elif any(outcome.error is None and not outcome.clean for outcome in outcomes):
            self._kill()
        return outcomes

    def close(self) -> None:
        """End every rank, by force where it does not end by itself.

        Raises:
            OrphanError: one is still there.
        """
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(5.0)
        self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        if self._processes:
            return
        Path(self._folder).mkdir(exist_ok=True)
        _SPAWNER.set_executable(str(warm.folder() / "python"))
        for rank in range(self.num_ranks):
            ours, theirs = _SPAWNER.Pipe()
            start = _Start(rank, self.num_ranks, self._folder, self.env)
            process = _SPAWNER.Process(target=_rank_main, args=(start, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _rendezvous(self) -> str:
        if self.store == "file":
            return f"file:{self._folder}/store{next(self._serial)}"
        store = dist.TCPStore("127.0.0.1", 0, self.num_ranks, is_master=True, wait_for_workers=False)
        self._stores = [store]
        return f"tcp:127.0.0.1:{store.port}"

    def _collect(self, deadline_s: float) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + deadline_s
        while len(outcomes) < self.num_ranks:
            pending = [rank for rank in range(self.num_ranks) if rank not in outcomes]
            sources = {self._pipes[rank]: rank for rank in pending}
            left_s = deadline - time.monotonic()
            ready = wait(list(sources), timeout=max(0.0, min(left_s, STOPPED_CHECK_S)))
            if not ready and (left_s <= 0 or all(_is_stopped(self._processes[rank].pid) for rank in pending)):
                break
            for pipe in ready:
                rank = sources[pipe]  # type: ignore[index]
                outcomes[rank] = self._receive(rank)
        for rank in range(self.num_ranks):
            if rank not in outcomes:
                outcomes[rank] = Outcome(rank, missed_deadline=True, log=self._stack(rank))
        return [outcomes[rank] for rank in range(self.num_ranks)]

    def _receive(self, rank: int) -> Outcome:
        try:
            return self._pipes[rank].recv()  # type: ignore[no-any-return]
        except (EOFError, ConnectionResetError):
            process = self._processes[rank]
            process.join(LIMIT_S)
            return Outcome(rank, exit_code=process.exitcode, log=self._log(rank))

    def _log(self, rank: int) -> str:
        with contextlib.suppress(FileNotFoundError):
            return _log_path(self._folder, rank).read_text(errors="replace")[-6000:]
        return ""

    def _stack(self, rank: int) -> str:
        """Ask a rank that hangs to write its stack into its log; return the log."""
        process, until_s = self._processes[rank], time.monotonic() + LIMIT_S
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
        log, before = "", None
        while process.is_alive() and not _is_stopped(process.pid) and time.monotonic() < until_s:
            if _STACK in log and log == before:
                break
            process.join(0.1)
            log, before = self._log(rank), log
        return self._log(rank)

    def _kill(self) -> None:
        processes, self._processes = self._processes, []
        pipes, self._pipes = self._pipes, []
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in processes:
            process.join(LIMIT_S)
        for pipe in pipes:
            pipe.close()
        left = [process.pid for process in processes if process.is_alive()]
        if left:
            raise OrphanError(f"ranks {left} survived SIGKILL for {LIMIT_S:g} s")


_pools: dict[int, Ranks] = {}


def pool(num_ranks: int) -> Ranks:
    """Return the pool of `num_ranks` that the whole session shares; it is closed at exit."""
    if num_ranks not in _pools:
        _pools[num_ranks] = Ranks(num_ranks)
    return _pools[num_ranks]


@atexit.register
def close_pools() -> None:
    """Close every shared pool; safe to call twice."""
    while _pools:
        _pools.popitem()[1].close()


@dataclass(frozen=True)
class Job:
    """The result of a command that started processes: its exit code and its output."""

    exit_code: int
    stdout: str
    stderr: str

    def checked(self) -> Job:
        """Return this job. Raises RanksFailedError if it did not exit with 0."""
        if self.exit_code != 0:
            raise RanksFailedError(
                f"exit code {self.exit_code}\n{self.stdout[-4000:]}\n{self.stderr[-8000:]}"
            )
        return self


def torchrun(
    script: str | Path,
    *args: str,
    num_ranks: int = 2,
    env: Mapping[str, str] | None = None,
    deadline_s: float = 120.0,
) -> Job:
    """Run `script` under plain torchrun on a port that torchrun picks; `warm.py` says in which interpreters.

    Raises:
        OrphanError: a process of the job outlived it.
        RanksFailedError: the deadline passed.
    """
    launcher = [
        str(warm.folder() / "torchrun"),
        "--standalone",
        f"--nproc-per-node={num_ranks}",
    ]
    return run_job([*launcher, str(script), *args], env=env, deadline_s=deadline_s)


def run_job(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    deadline_s: float = 120.0,
    grace_s: float = LIMIT_S,
) -> Job:
    """Run `command` in a session of its own and make sure that nothing of it is left, `grace_s` after its end."""
    mark = uuid.uuid4().hex
    full = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **(env or {}), MARK: mark}
    process = subprocess.Popen(
        list(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=full,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired as error:
        _end(marked(mark))
        stdout, stderr = process.communicate()
        raise RanksFailedError(
            f"{command} passed its deadline\n{stdout[-4000:]}\n{stderr[-8000:]}"
        ) from error
    left = list(_after_grace(mark, grace_s))
    if left:
        _end(left)
        raise OrphanError(f"{command} left processes {left}")
    return Job(process.returncode, stdout, stderr)


def marked(mark: str) -> Iterator[int]:
    """Return the ids of living processes whose environment holds `mark`."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            is_ours = f"{MARK}={mark}".encode() in (entry / "environ").read_bytes()
            if is_ours and "\nState:\tZ" not in (entry / "status").read_text():
                yield int(entry.name)


def _after_grace(mark: str, grace_s: float) -> Iterator[int]:
    deadline = time.monotonic() + grace_s
    while (left := list(marked(mark))) and time.monotonic() < deadline:
        time.sleep(0.05)  # polling another process's end: there is nothing to wait on
    return iter(left)


def _end(pids: Iterator[int] | Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def seeded(*parts: object) -> random.Random:
    """Return a random source that depends on `parts` only, the same in every process."""
    return random.Random(repr(parts))
