"""Times of the calling thread, by the kernel: on a core, waiting for one, stopped by a quota.

Each file is opened once and read by `pread`: a microsecond each, fifteen times less than opening it.
"""

from __future__ import annotations

import contextlib
import os
import resource
from dataclasses import dataclass
from pathlib import Path

from paceline.host.processes import stat_of

_ROOT = Path("/")


@dataclass(frozen=True)
class ThreadTimes:
    """The kernel's counters of a thread since it began; 0 if the kernel does not count."""

    cpu_s: float  # on a core
    queued_s: float  # ready, and waiting for a core; contains `throttled_s`
    throttled_s: float  # its cgroup's processes: stopped by their quota
    major_faults: int  # pages that came from a disk
    preemptions: int  # times it was put off its core


class ThreadClock:
    """The counters of the thread that made this object, for no other thread or process. Its files close with it."""

    def __init__(self) -> None:
        self._schedstat = self._quota = -1
        self._schedstat = _opened(Path("/proc/thread-self/schedstat"))
        self._quota = next((fd for path in _quota_files() if (fd := _opened(path)) >= 0), -1)

    def read(self) -> ThreadTimes:
        """Return the present counters. It never raises, and takes five microseconds."""
        cpu_ns, queued_ns = _numbers(self._schedstat, 2)
        usage = resource.getrusage(resource.RUSAGE_THREAD)
        throttled_s = _throttled_s(_read(self._quota))
        return ThreadTimes(1e-9 * cpu_ns, 1e-9 * queued_ns, throttled_s, usage.ru_majflt, usage.ru_nivcsw)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        for file in (self._schedstat, self._quota):
            if file >= 0:
                os.close(file)
        self._schedstat = self._quota = -1


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _read(file: int, size: int = 512) -> bytes:
    try:
        return os.pread(file, size, 0) if file >= 0 else b""
    except OSError:
        return b""


def _numbers(file: int, count: int) -> list[int]:
    found = _read(file, 64).split()[:count]
    return [int(x) for x in found] if len(found) == count else [0] * count


def _throttled_s(words: bytes) -> float:
    """Return the throttled time in a cgroup's cpu.stat: version 2 counts microseconds, version 1 nanoseconds."""
    for line in words.splitlines():
        if line.startswith(b"throttled_usec "):
            return 1e-6 * int(line.split()[1])
        if line.startswith(b"throttled_time "):
            return 1e-9 * int(line.split()[1])
    return 0.0


def cpu_groups(root: Path = _ROOT) -> list[Path]:
    """Return the folders of this process's cgroup that may limit its cores, likeliest first. Raises OSError."""
    found = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        # Version 1 has a tree for each controller, mounted under one of two names.
        is_limiting = not controllers or "cpu" in controllers.split(",")
        names = ("cpu", "cpu,cpuacct") if controllers else ("",)
        found += [root / "sys/fs/cgroup" / name / path.strip("/") for name in names if is_limiting]
    return found


def _quota_files() -> list[Path]:
    with contextlib.suppress(OSError):
        return [folder / "cpu.stat" for folder in cpu_groups()]
    return []


_USER, _SYSTEM, _CORE, _DISK = 11, 12, 36, 39  # fields of /proc/PID/stat behind the name (proc(5))
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_SHOWN = 3


class CoreNeighbours:
    """Finds the processes that share this thread's core. The first look finds none: it has nothing to compare with."""

    def __init__(self) -> None:
        self._before: dict[int, float] = {}

    def look(self) -> list[tuple[int, str, float]]:
        """Return the processes that used this core most since the look before: id, name, seconds; most first."""
        used: dict[int, float] = {}
        found = []
        core = _of_this_thread(_CORE)
        for name in os.listdir("/proc"):  # noqa: PTH208  half as long as iterdir
            if not name.isdigit() or (pid := int(name)) == os.getpid():
                continue
            try:
                words = Path("/proc", name, "stat").read_text(errors="replace")
            except OSError:
                continue
            command, _, behind = words.partition("(")[2].rpartition(")")
            fields = behind.split()
            used[pid] = _TICK_S * (int(fields[_USER]) + int(fields[_SYSTEM]))
            since_s = used[pid] - self._before.get(pid, used[pid])
            if since_s > 0 and int(fields[_CORE]) == core:
                found.append((pid, command, since_s))
        self._before = used
        return sorted(found, key=lambda x: -x[2])[:_SHOWN]


def _of_this_thread(field: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int(stat_of("thread-self")[field])
    return -1


def swapped_in_pages() -> int:
    """Return how many pages this host has read back from swap since it started; 0 if the kernel does not say."""
    try:
        words = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in words.splitlines() if line.startswith("pswpin ")), 0)


def stolen_s() -> float:
    """Return the time that a hypervisor took from all cores together; 0 if the kernel does not say."""
    try:
        with Path("/proc/stat").open() as file:
            return _TICK_S * int(file.readline().split()[8])
    except (OSError, IndexError):
        return 0.0


def disk_s() -> float:
    """Return how long this thread has waited for a disk; 0 where the kernel does not account for delays."""
    return _TICK_S * max(0, _of_this_thread(_DISK))
