"""What the kernel says about processes of this host: their state, start time and namespaces."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_STATE, _START_TIME = 0, 19  # fields of /proc/PID/stat, counted behind the name (proc(5))
GONE = "gone"
UNKNOWN = ""


def state_of(pid: int) -> str:
    """Return the kernel's letter for a process's state; GONE for none or a dead one, UNKNOWN if it does not say."""
    letter = _field(pid, _STATE)
    return GONE if letter in {"Z", "X"} else letter


def is_stopped(state: str) -> bool:
    """Whether a state, as of `state_of`, is that of a process stopped by a signal or a debugger."""
    return state in {"T", "t"}


def start_time_of(pid: int) -> str:
    """Return when the process started, in the kernel's ticks: tells it from a later one with the same id."""
    return _field(pid, _START_TIME)


def whereabouts(*namespaces: str) -> str:
    """Return words that two processes have in common if they run under one boot of one kernel, in these namespaces.

    Raises:
        OSError: The kernel does not say.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "/".join([boot, *(str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in namespaces)])


@dataclass(frozen=True)
class ProcessCard:
    """Who a process is, so that others can tell whether it is still there. Written into stores as `words`."""

    pid: int  # its id
    start_time: str  # as of `start_time_of`
    where: str  # Kernel and process namespace; "" if unknown. Who has the same can look it up.
    host: str  # its host's name, for people

    @classmethod
    def of_this_process(cls) -> ProcessCard:
        try:
            where = whereabouts("pid")
        except OSError:
            where = ""
        return cls(os.getpid(), start_time_of(os.getpid()), where, os.uname().nodename)

    @classmethod
    def from_words(cls, words: bytes) -> ProcessCard:
        pid, start_time, where, host = words.decode().split(" ", 3)
        return cls(int(pid), start_time, where, host)

    @property
    def words(self) -> str:
        return f"{self.pid} {self.start_time} {self.where} {self.host}"

    def __str__(self) -> str:
        return f"(process {self.pid} on {self.host})"

    def state(self) -> str:
        """The kernel's letter, as `state_of`; UNKNOWN for a process that cannot be seen from here."""
        if not self.where or self.where != ProcessCard.of_this_process().where:
            return UNKNOWN
        return state_of(self.pid) if start_time_of(self.pid) == self.start_time else GONE


def _field(pid: int, index: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[index]
    except (FileNotFoundError, ProcessLookupError):
        return GONE
    except (OSError, IndexError):
        return UNKNOWN
