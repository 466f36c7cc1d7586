"""CPU quotas: one cgroup a host, in version 1 or 2 of the kernel's interface; standard library only.

Rules
1. A cluster's groups lie in one folder whose name carries their owner.
2. They are removed by the laboratory. If it was killed as well, `remove_orphans` knows that a folder's owner is gone.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.lab.emulation.owner import PREFIX, is_orphan

_ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 20_000  # short, so that a quota of a quarter core runs 5 ms in every 20, not 25 in every 100
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Groups:
    """Where this process may make groups with a CPU quota.

    Attributes:
        folder: The parent of what is made.
        version: 1 or 2 of the interface.
    """

    folder: Path
    version: int

    def limit(self, owner: str, host: str, cores: float) -> Path:
        """Make the host's group and return its list of processes; who writes its id there is limited.

        Raises:
            OSError: The kernel refused.
        """
        group = self.folder / f"{PREFIX}{owner}" / host
        group.parent.mkdir(exist_ok=True)
        if self.version == 2:
            (group.parent / "cgroup.subtree_control").write_text("+cpu")
        group.mkdir()
        # The kernel's smallest quota is 1 ms.
        period_us = max(_PERIOD_US, round(1000 / cores))
        quota_us = round(period_us * cores)
        if self.version == 2:
            (group / "cpu.max").write_text(f"{quota_us} {period_us}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(period_us))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        return group / "cgroup.procs"


def find_groups() -> Groups | None:
    """Where CPU quotas can be set from here; None if nowhere."""
    return next((groups for groups in _candidates() if _usable(groups)), None)


def remove(owner: str) -> None:
    """Remove this owner's groups, whose processes are ending."""
    for groups in _candidates():
        _remove_folder(groups.folder / f"{PREFIX}{owner}", _PATIENCE_S)


def remove_orphans() -> list[str]:
    """Remove the groups of owners that have ended without doing so; returns their names."""
    removed = []
    for groups in _candidates():
        for folder in groups.folder.glob(f"{PREFIX}*"):
            if is_orphan(folder.name):
                _remove_folder(folder, 0.0)
                removed.append(folder.name)
    return removed


def _candidates() -> list[Groups]:
    """Our own group first, then the hierarchy's root: version 2 has no quotas below a group that holds processes."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "cpu" in controllers.split(","):
                found += [Groups(root / path.lstrip("/"), 1) for root in (_ROOT / controllers, _ROOT / "cpu")]
            elif controllers == "" and (_ROOT / "cgroup.controllers").exists():
                own = _ROOT / path.lstrip("/")
                found += [Groups(own, 2), Groups(own.parent if own != _ROOT else own, 2), Groups(_ROOT, 2)]
    return list(dict.fromkeys(groups for groups in found if groups.folder.is_dir()))


def _usable(groups: Groups) -> bool:
    if not os.access(groups.folder, os.W_OK):
        return False
    if groups.version == 1:
        return (groups.folder / "cpu.shares").exists() or (groups.folder / "cgroup.procs").exists()
    try:
        if "cpu" not in (groups.folder / "cgroup.controllers").read_text().split():
            return False
        if "cpu" not in (groups.folder / "cgroup.subtree_control").read_text().split():
            (groups.folder / "cgroup.subtree_control").write_text("+cpu")
    except OSError:
        return False
    return True


def _remove_folder(folder: Path, patience_s: float) -> None:
    if not folder.is_dir():
        return
    deadline_s = time.monotonic() + patience_s
    for group in (*filter(Path.is_dir, folder.iterdir()), folder):
        while group.is_dir():
            try:
                group.rmdir()
            except OSError:  # its processes are still ending
                if time.monotonic() >= deadline_s:
                    return
                time.sleep(0.01)
