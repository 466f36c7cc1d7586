"""How much memory does this machine have to spare?"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> float:
    """What can be had without swapping, by the kernel and by the limit of this container; 0 where neither says."""
    found = math.inf
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        found = 1024.0 * float(lines["MemAvailable"].split()[0])
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        limit = float((cgroup / "memory.max").read_text())
        found = min(found, max(0.0, limit - float((cgroup / "memory.current").read_text())))
    return found if found < math.inf else 0.0
