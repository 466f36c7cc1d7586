"""The memory that this machine has to spare."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

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
