"""The watchdog: a supervisor process that ends a launch's ranks if the launcher dies, even by SIGKILL.

Rules
1. The watchdog reads its standard input, a pipe whose other end only the launcher holds. The kernel closes
   that end however the launcher dies, SIGKILL included.
2. `done` before the end of the pipe means that every rank ended well: the watchdog exits without searching for any.
3. Otherwise it ends every process of the launch: SIGTERM, a grace, SIGKILL. `LaunchProcesses` finds them, also those
   that have changed their environment.
4. The launcher adopts its descendants' orphans (PR_SET_CHILD_SUBREAPER). So a daemon of a rank becomes a child of the
   launcher, where the watchdog sees it.
5. Either way the launch's folder of temporary files is removed, by the watchdog or by the launcher, whichever was not
   killed. If both were killed together, the next launch removes it: the folder's name says which process owned it. A
   container or an emulated host takes both along when it ends, and no later launch can tell. The program that makes
   such hosts names a folder of its own (`PLACE`), and removes that.
6. This file runs as a plain script and imports only the standard library: it costs milliseconds.

Limits: Linux with /proc; elsewhere it does nothing. If the launcher is killed, a process escapes that has overwritten
its environment within `_LOOK_S` of its start.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from typing_extensions import Self

MARK = "PACELINE_LAUNCH_ID"
PLACE = "PACELINE_LAUNCH_FOLDERS"  # where the launches' folders are made, if not among temporary files
GRACE_S = 5.0
_PAUSE_S = 0.02
_LOOK_S = 0.1  # how often the watchdog notes the launcher's children; some files of /proc each time
_PREFIX = "paceline-run-"
_ADOPT, _ADOPTS = 36, 37  # PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER


class Watchdog:
    """The launcher's handle on its watchdog; a context manager around the launch."""

    def __init__(self, launch_id: str) -> None:
        self._launch_id = launch_id
        self._folder = _place() / f"{_PREFIX}{_identity(os.getpid())}.{launch_id}"

    @property
    def folder(self) -> Path:
        """Return the folder for temporary files of the launch. It is made at the first use, and removed at the end."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        return self._folder

    def __enter__(self) -> Self:
        remove_orphans()
        self._adopted = _adopt(wanted=True)
        own = os.getpid()
        self._kin = LaunchProcesses(self._launch_id, (own, _start(own)), _children(own))
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(self._folder), *self._kin.words],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C in the terminal must not reach it
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The watchdog may have been killed; then no process reads the pipe, and its work is left to the launcher.
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(b"done" if kind is None else b"")
        if self._process.wait() != 0 and kind is not None:
            self._kin.end()
        _adopt(wanted=self._adopted)
        shutil.rmtree(self._folder, ignore_errors=True)


class _Process(NamedTuple):
    """The facts of a process in /proc."""

    parent: int
    session: int
    is_over: bool
    start: str  # in the kernel's ticks: tells it from a later process with the same number


class LaunchProcesses:
    """The processes of a launch: marked ones, the launcher's children, and their descendants and sessions.

    `launcher` is its process id and start. `others` are the starts of children that it had before the launch, which do
    not count.
    """

    def __init__(self, launch_id: str, launcher: tuple[int, str], others: dict[int, str]) -> None:
        self._launch_id, self._launcher, self._others = launch_id, launcher, others
        self._known: dict[int, str] = {}

    @property
    def words(self) -> list[str]:
        """Return the constructor's arguments as words of a command line, which `from_words` reads."""
        return [
            self._launch_id,
            *(f"{pid}.{start}" for pid, start in (self._launcher, *self._others.items())),
        ]

    @classmethod
    def from_words(cls, words: list[str]) -> LaunchProcesses:
        launch_id, *numbers = words
        launcher, *others = [(int(pid), start) for pid, _, start in (w.partition(".") for w in numbers)]
        return cls(launch_id, launcher, dict(others))

    def look(self) -> None:
        """Note the launcher's children. After its death, /proc no longer says whose they are."""
        pid, start = self._launcher
        if _start(pid) == start:
            for child, born in _children(pid).items():
                if self._others.get(child) != born:
                    self._known[child] = born

    def living(self) -> list[int]:
        """Return the process ids of the launch, without watchdogs, which end by themselves."""
        self.look()
        spared = {os.getpid(), self._launcher[0]}
        processes = {pid: process for pid, process in _processes().items() if pid not in spared}
        found = {pid for pid in marked(self._launch_id) if pid in processes}
        found |= {
            pid for pid, start in self._known.items() if pid in processes and processes[pid].start == start
        }
        self._known |= {pid: processes[pid].start for pid in found}
        grown = True
        while grown:
            grown = False
            for pid, process in processes.items():
                if pid not in found and (process.parent in found or self._leads(process.session, processes)):
                    found.add(pid)
                    self._known[pid] = process.start
                    grown = True
        return [pid for pid in found if not processes[pid].is_over and not _is_watchdog(pid)]

    def end(self, grace_s: float = GRACE_S) -> None:
        """End all processes: SIGTERM first, SIGKILL for those that still live after `grace_s`."""
        deadline_s = time.monotonic() + grace_s
        told: set[int] = set()
        while pids := self.living():
            late = time.monotonic() > deadline_s
            for pid in pids:
                if late or pid not in told:
                    told.add(pid)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
            time.sleep(_PAUSE_S)

    def _leads(self, session: int, processes: dict[int, _Process]) -> bool:
        """Return whether a process of the launch leads this session. Its number is not reused while it has members."""
        if session not in self._known:
            return False
        return session not in processes or processes[session].start == self._known[session]


def remove_orphans() -> None:
    """Remove the folders of launches whose launcher, watchdog and ranks are gone."""
    for folder in _place().glob(f"{_PREFIX}*.*.*.*"):
        namespace, pid, _, launch_id = folder.name.removeprefix(_PREFIX).split(".", 3)
        owner = folder.name.removeprefix(_PREFIX).rpartition(".")[0]
        is_ours = namespace == _identity(os.getpid()).partition(".")[0] and pid.isdigit()
        if is_ours and owner != _identity(int(pid)) and not marked(launch_id):
            shutil.rmtree(folder, ignore_errors=True)


def _place() -> Path:
    return Path(os.environ.get(PLACE) or tempfile.gettempdir())


def marked(launch_id: str) -> list[int]:
    """Return the process ids whose environment carries this launch's mark."""
    needle = f"{MARK}={launch_id}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            if needle in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def _identity(pid: int) -> str:
    """Return the namespace, number and start time of a living process, which differ for a reused number."""
    process = _process(pid)
    if process is None or process.is_over:  # a zombie owns nothing
        return f"0.{pid}.0"
    return f"{Path('/proc/self/ns/pid').stat().st_ino}.{pid}.{process.start}"


def _process(pid: int) -> _Process | None:
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()
        return _Process(int(fields[1]), int(fields[3]), fields[0] in "ZX", fields[19])
    return None


def _processes() -> dict[int, _Process]:
    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return {pid: process for pid in pids if (process := _process(pid)) is not None}


def _start(pid: int) -> str:
    process = _process(pid)
    return "" if process is None else process.start


def _children(pid: int) -> dict[int, str]:
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += [int(word) for word in file.read_text().split()]
    return {child: _start(child) for child in found}


def _is_watchdog(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return os.fsencode(__file__) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return False


def _adopt(*, wanted: bool) -> bool:
    """Set whether this process adopts its descendants' orphans. Return whether it did before."""
    if sys.platform != "linux":
        return False
    libc, before = ctypes.CDLL(None), ctypes.c_int(0)
    libc.prctl(_ADOPTS, ctypes.byref(before))
    libc.prctl(_ADOPT, int(wanted), 0, 0, 0)
    return bool(before.value)


def _watch(folder: str, kin: LaunchProcesses) -> None:
    """Wait for the launcher's end, then end the launch's processes if need be, and remove its folder."""
    while not select.select([sys.stdin], [], [], _LOOK_S)[0]:
        kin.look()
    if sys.stdin.buffer.read() != b"done":
        kin.end()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    # Of a job's scheduler, to all its processes.
    for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(_number, signal.SIG_IGN)
    _watch(sys.argv[1], LaunchProcesses.from_words(sys.argv[2:]))
