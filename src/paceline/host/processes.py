"""What the kernel says about processes of this host: their state, start time and namespaces."""

from __future__ import annotations

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


def _field(pid: int, index: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[index]
    except (FileNotFoundError, ProcessLookupError):
        return GONE
    except (OSError, IndexError):
        return UNKNOWN
