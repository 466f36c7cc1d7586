"""Other processes that ran on this thread's core, and what this process's threads waited for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from paceline.host.processes import children_of, stat_of

_USER, _SYSTEM, _CORE, _DISK = 11, 12, 36, 39  # fields of /proc/PID/stat behind the name (proc(5))
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_SHOWN = 3


@dataclass(frozen=True)
class CoreUse:
    """A process that ran on the core last, and its time on any core since the look before."""

    pid: int
    name: str
    cpu_s: float


class CoreNeighbours:
    """Looks now and then; the first look finds nothing, as it has nothing to compare with."""

    def __init__(self) -> None:
        self._before: dict[int, float] = {}

    def look(self) -> tuple[CoreUse, ...]:
        """Return the processes that used this thread's core most since the look before, most first."""
        used: dict[int, float] = {}
        found = []
        core = _core_of_this_thread()
        for name in os.listdir("/proc"):  # noqa: PTH208  half as long as iterdir
            if not name.isdigit() or (pid := int(name)) == os.getpid():
                continue
            try:
                words = Path("/proc", name, "stat").read_text()
            except OSError:
                continue
            command, _, behind = words.partition("(")[2].rpartition(")")
            fields = behind.split()
            used[pid] = _TICK_S * (int(fields[_USER]) + int(fields[_SYSTEM]))
            since_s = used[pid] - self._before.get(pid, used[pid])
            if since_s > 0 and int(fields[_CORE]) == core:
                found.append(CoreUse(pid, command, since_s))
        self._before = used
        return tuple(sorted(found, key=lambda x: -x.cpu_s)[:_SHOWN])


def _core_of_this_thread() -> int:
    try:
        return int(stat_of("thread-self")[_CORE])
    except OSError:
        return -1


def swapped_in_pages() -> int:
    """Pages that this host has brought back from swap since it started; 0 if it does not say."""
    try:
        words = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in words.splitlines() if line.startswith("pswpin ")), 0)


def frequency_ratio() -> float | None:
    """The frequency of this thread's core over the highest it may have; None if the kernel does not say."""
    folder = Path(f"/sys/devices/system/cpu/cpu{_core_of_this_thread()}/cpufreq")
    try:
        return int((folder / "scaling_cur_freq").read_text()) / int((folder / "cpuinfo_max_freq").read_text())
    except (OSError, ValueError, ZeroDivisionError):
        return None


def stolen_s() -> float:
    """Return the time that a hypervisor took from all cores together; 0 if the kernel does not say."""
    try:
        with Path("/proc/stat").open() as file:
            return _TICK_S * int(file.readline().split()[8])
    except (OSError, IndexError):
        return 0.0


def disk_s() -> float:
    """Return how long this thread has waited for a disk; 0 where the kernel does not account for delays."""
    return _disk_s("thread-self")


def children_disk_s() -> float:
    """Return how long this process's children, its loader workers among them, have waited for a disk."""
    return sum(map(_disk_s, children_of("self")))


def _disk_s(process: int | str) -> float:
    try:
        return _TICK_S * int(stat_of(process)[_DISK])
    except (OSError, IndexError):
        return 0.0
