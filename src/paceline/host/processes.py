"""Facts from the kernel about processes of this host: their state, start time and namespaces."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from dataclasses import dataclass
from pathlib import Path

# Fields of /proc/PID/stat, counted behind the name (proc(5)).
_STATE, _PARENT, _FLAGS, _USER_TICKS, _SYSTEM_TICKS, _START_TIME, _EXIT_STATUS = 0, 1, 6, 11, 12, 19, 49
_PF_EXITING = 0x4
GONE = "gone"
UNKNOWN = ""


def state_of(pid: int) -> str:
    """Return the kernel's letter for a process's state; GONE for none or a dead one, UNKNOWN if it does not say."""
    letter = _field(pid, _STATE)
    return GONE if letter in {"Z", "X"} else letter


def is_stopped(state: str) -> bool:
    """Return whether a state, as of `state_of`, is that of a process stopped by a signal or a debugger."""
    return state in {"T", "t"}


def parent_of(pid: int) -> int:
    """Return the process id of a process's parent; 0 if there is none, or the kernel does not say."""
    words = _field(pid, _PARENT)
    return int(words) if words.isdecimal() else 0


def start_time_of(pid: int) -> str:
    """Return when the process started, in the kernel's ticks: tells it from a later one with the same id."""
    return _field(pid, _START_TIME)


def whereabouts(*namespaces: str) -> str:
    """Return a text that is equal for processes of the same boot and namespaces. Raises OSError if unknown."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "/".join([boot, *(str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in namespaces)])


@dataclass(frozen=True)
class Vitals:
    """The state of a process at one moment, by the kernel."""

    state: str  # as of `state_of`
    is_ending: bool  # It has begun to end. Its sockets and its pidfd say so later, when its memory is free.
    cpu_ticks: int  # that its main thread has used


class VitalSigns:
    """The vitals of one process, read repeatedly from a file that stays open: some microseconds per look."""

    def __init__(self, pid: int) -> None:
        # Not /proc/PID/stat, which counts what all threads use: some look after a main thread that hangs.
        self._file = os.open(f"/proc/{pid}/task/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        self._exit_status: int | None = None

    def look(self) -> Vitals:
        try:
            words = os.pread(self._file, 1024, 0).rsplit(b")", 1)[1].split()
            state = words[_STATE].decode()
            is_ending = bool(int(words[_FLAGS]) & _PF_EXITING) or state in {"Z", "X"}
            status = int(words[_EXIT_STATUS])
            if status or state in {"Z", "X"}:  # before, the kernel may not have written it
                self._exit_status = status
            return Vitals(state, is_ending, int(words[_USER_TICKS]) + int(words[_SYSTEM_TICKS]))
        except (OSError, IndexError):
            return Vitals(GONE, is_ending=True, cpu_ticks=0)

    def exit_status(self) -> int | None:
        """Return the wait status of a process that was looked at as it ended; None if it was reaped before."""
        self.look()
        return self._exit_status

    def close(self) -> None:
        os.close(self._file)


@dataclass(frozen=True)
class ProcessIdentity:
    """The identity of a process, by which others can tell whether it still exists. Stores hold it as `words`."""

    pid: int  # its id
    start_time: str  # as of `start_time_of`
    where: str  # Kernel and process namespace; "" if unknown. A process with the same can look it up.
    host: str  # its host's name, for people

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        return _card_of(os.getpid())

    @classmethod
    def from_words(cls, words: bytes) -> ProcessIdentity:
        pid, start_time, where, host = words.decode().split(" ", 3)
        return cls(int(pid), start_time, where, host)

    @property
    def words(self) -> str:
        return f"{self.pid} {self.start_time} {self.where} {self.host}"

    def __str__(self) -> str:
        return f"(process {self.pid} on {self.host})"

    def state(self) -> str:
        """Return the kernel's letter, as `state_of`. It is UNKNOWN for a process of another host or namespace."""
        if not self.where or self.where != ProcessIdentity.of_this_process().where:
            return UNKNOWN
        return state_of(self.pid) if start_time_of(self.pid) == self.start_time else GONE


@functools.lru_cache(maxsize=1)  # a fork has another id
def _card_of(own_pid: int) -> ProcessIdentity:
    try:
        where = whereabouts("pid")
    except OSError:
        where = ""
    return ProcessIdentity(own_pid, start_time_of(own_pid), where, os.uname().nodename)


def stat_of(process: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat behind the name; of `thread-self` those of this thread. Raises OSError.

    The kernel cuts the name after 15 bytes, perhaps within a letter.
    """
    return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()


def children_of(pid: int | str) -> list[int]:
    """Return the children of a process, by its id. "self" is this process."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, file.read_text().split())
    return found


def threads_queued(pid: int | str = "self") -> tuple[int, float]:
    """Return how many threads a process has, and how long they were ready and had no core, all together."""
    queued_ns = []
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError, ValueError):  # it has just ended
            queued_ns.append(int(file.read_text().split()[1]))
    return len(queued_ns), 1e-9 * sum(queued_ns)


def _field(pid: int, index: int) -> str:
    try:
        return stat_of(pid)[index]
    except (FileNotFoundError, ProcessLookupError):
        return GONE
    except (OSError, IndexError):
        return UNKNOWN


_TICK_S = 0.01  # of /proc/PID/stat; USER_HZ is 100 on Linux
# Fields behind the name (proc(5)): pages that came by faults, utime, stime, cutime and cstime, waits for disks.
_MINOR_FAULTS, _MAJOR_FAULTS, _TIMES, _DISK_TIME = 7, 9, slice(11, 15), 39
# Of the time: less is what waiting threads take to look around, and to queue for that on a busy machine.
_LEAST_ON_CORE, _LEAST_READY = 0.05, 0.3
_LEAST_BYTES = 64 * 1024
_LEAST_FAULTS = 50


@dataclass(frozen=True)
class Activity:
    """The totals of a process and its descendants, since they started."""

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
    """Return the activity of a process and its descendants; all zeros if there is no such process."""
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


_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> float:
    """Return the bytes that can be allocated without swapping, also by this container's limit; 0 if unknown."""
    found = math.inf
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        found = 1024.0 * float(lines["MemAvailable"].split()[0])
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        limit = float((cgroup / "memory.max").read_text())
        found = min(found, max(0.0, limit - float((cgroup / "memory.current").read_text())))
    return found if found < math.inf else 0.0
