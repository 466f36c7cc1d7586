"""The resources of a process that a dropped model might have left: threads, descriptors, shared memory."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import astuple, dataclass
from pathlib import Path

LIMIT_S = 20.0


@dataclass(frozen=True)
class Held:
    """The resources that a process holds."""

    num_threads: int
    num_descriptors: int
    num_shared_mappings: int

    def within(self, other: Held) -> bool:
        """Return whether no resource is more than in `other`."""
        return all(now <= once for now, once in zip(astuple(self), astuple(other), strict=True))


def held() -> Held:
    """Return the resources that this process holds now."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared = sum(line.split()[1].endswith("s") for line in maps)
    threads, descriptors = (len(list(Path("/proc/self", name).iterdir())) for name in ("task", "fd"))
    return Held(threads, descriptors, shared)


def held_at_rest() -> Held:
    """Return the resources held after closed groups are gone."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "paceline-close":
            thread.join(LIMIT_S)
    return held()


def settled(most: Held, collects: bool = True) -> Held:
    """Wait until threads that release groups, or linger for peers, have ended. Return the resources held then."""
    until_s = time.monotonic() + LIMIT_S
    while True:
        if collects:
            gc.collect()
        now = held()
        if now.within(most) or time.monotonic() > until_s:
            return now
        time.sleep(0.1)
