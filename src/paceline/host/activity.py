"""The activity of a process and its descendants: what they have computed, read and written, by their kernel."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from paceline.host.processes import children_of, stat_of, state_of, threads_queued

_TICK_S = 0.01  # of /proc/PID/stat; USER_HZ is 100 on Linux
# Fields behind the name (proc(5)): pages that came by faults, utime, stime, cutime and cstime, waits for disks.
_MINOR_FAULTS, _MAJOR_FAULTS, _TIMES, _DISK_TIME = 7, 9, slice(11, 15), 39
# Of the time: less is what waiting threads take to look around, and to queue for that on a busy machine.
_LEAST_ON_CORE, _LEAST_READY = 0.05, 0.3
_LEAST_BYTES = 64 * 1024
_LEAST_FAULTS = 50


@dataclass(frozen=True)
class Activity:
    """Totals of a process and its descendants, since they started."""

    on_core_s: float  # on a core, or waiting for a disk
    queued_s: float  # ready for a core
    moved_bytes: int  # read and written, from files and pipes
    num_faults: int  # pages that it has touched anew
    on_disk: bool  # whether the process waits for a disk right now

    def has_done_something(self, before: Activity, elapsed_s: float) -> bool:
        """Return whether it has computed, read or written since `before`, so many seconds ago."""
        on_core_s = self.on_core_s - before.on_core_s
        return (
            self.on_disk
            or on_core_s > _LEAST_ON_CORE * elapsed_s
            or on_core_s + self.queued_s - before.queued_s > _LEAST_READY * elapsed_s
            or self.moved_bytes - before.moved_bytes > _LEAST_BYTES
            or self.num_faults - before.num_faults > _LEAST_FAULTS
        )


def activity_of(pid: int) -> Activity:
    """Read it. Of a process that is not there: nothing."""
    tree = family_of(pid)
    fields = [found for each in tree if (found := _fields(each))]
    ticks = sum(sum(map(int, found[_TIMES])) + int(found[_DISK_TIME]) for found in fields)
    return Activity(
        on_core_s=_TICK_S * ticks,
        queued_s=sum(threads_queued(each)[1] for each in tree),
        moved_bytes=sum(map(_moved_bytes, tree)),
        num_faults=sum(int(found[_MINOR_FAULTS]) + int(found[_MAJOR_FAULTS]) for found in fields),
        on_disk=state_of(pid) == "D",
    )


def family_of(pid: int) -> list[int]:
    """Return a process and its descendants, parents first."""
    found = [pid]
    for each in found:
        found += children_of(each)
    return found


def _fields(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        found = stat_of(pid)
        return found if len(found) > _DISK_TIME else []
    return []


def _moved_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        return int(lines["rchar"]) + int(lines["wchar"])
    return 0
