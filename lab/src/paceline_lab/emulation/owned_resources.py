"""The cgroups and the folder of an emulated cluster: whatever of it has a name and could survive its processes.

Rules
1. Namespaces, links and processes go by themselves (see `namespaces`). What could be left behind, if owner and
   laboratory are killed together, are empty cgroups and a folder of logs.
2. Both are called `paceline-emulate-` and their owner's id, so that what a dead owner left can be told from what is in
   use. The laboratory removes them; the owner, if the laboratory was killed; else the next start, or `--clean`.
3. A host's CPU quota is a cgroup in a folder of its owner's, in version 1 or 2 of the kernel's interface.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "paceline-emulate-"
_CGROUPS = Path("/sys/fs/cgroup")
_PERIOD_US = 20_000  # short, so that a quota of a quarter core runs 5 ms in every 20, not 25 in every 100
_PATIENCE_S = 10.0


# ---- owners


def new_owner_id() -> str:
    """Return an id that this process has not used before.

    It consists of the process's namespace, number and start time, then a random part. So a reused number or another
    container's process is never mistaken for it. The random part is there because a process may own several clusters.
    """
    return f"{_identity(os.getpid())}.{secrets.token_hex(4)}"


def remove(owner: str) -> None:
    """Remove this owner's cgroups, whose processes are ending, and its folder."""
    for place in _cgroup_places():
        _remove_cgroups(place.folder / f"{_PREFIX}{owner}", _PATIENCE_S)
    shutil.rmtree(_folder_of(owner), ignore_errors=True)


def remove_orphans() -> list[str]:
    """Remove the resources of owners that have ended, and return their names."""
    removed = []
    for place in _cgroup_places():
        for folder in place.folder.glob(f"{_PREFIX}*"):
            if _is_orphan(folder.name):
                _remove_cgroups(folder, 0.0)
                removed.append(folder.name)
    for path in list(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*")):
        if _is_orphan(path.name):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path.name)
    return removed


def _is_orphan(name: str) -> bool:
    """Return whether the owner in this name was a process of this namespace that has ended."""
    identity, _, _ = name.removeprefix(_PREFIX).rpartition(".")
    namespace, pid, *_ = [*identity.split("."), "", ""]
    if not name.startswith(_PREFIX) or namespace != _namespace() or not pid.isdigit():
        return False
    return identity != _identity(int(pid))


def _identity(pid: int) -> str:
    return f"{_namespace()}.{pid}.{_start_time(pid)}"


def _namespace() -> str:
    with contextlib.suppress(OSError):
        return str(os.stat("/proc/self/ns/pid").st_ino)  # noqa: PTH116 - a namespace is no path
    return "0"


def _start_time(pid: int) -> str:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        if fields[0] not in "ZX":  # a zombie owns nothing; in a container its parent may never wait for it
            return fields[19]
    return "gone"


# ---- the folder


def make_folder(owner: str) -> Path:
    """A folder for temporary files of this owner's."""
    path = _folder_of(owner)
    path.mkdir(mode=0o700)
    return path


def _folder_of(owner: str) -> Path:
    return Path(tempfile.gettempdir(), f"{_PREFIX}{owner}")


# ---- cgroups


@dataclass(frozen=True)
class CgroupPlace:
    """The folder in which this process may make cgroups with a CPU quota.

    Attributes:
        folder: Parent of the cgroups that are made.
        version: Version of the interface, 1 or 2.
    """

    folder: Path
    version: int

    def limit(self, owner: str, host: str, cores: float | None) -> Path:
        """Make the host's cgroup and return its list of processes; who writes its id there is limited.

        Args:
            owner: Id of the owner.
            host: Name of the host.
            cores: Number of cores that its processes may use together; None: any number.

        Raises:
            OSError: The kernel refused.
        """
        group = self._group(owner, host)
        group.parent.mkdir(exist_ok=True)
        if self.version == 2:
            (group.parent / "cgroup.subtree_control").write_text("+cpu")
        group.mkdir()
        if cores is not None:
            self.set_quota(owner, host, cores)
        return group / "cgroup.procs"

    def set_quota(self, owner: str, host: str, cores: float) -> None:
        """Change the number of cores that the processes of a host's cgroup may use."""
        group = self._group(owner, host)
        # The kernel's smallest quota is 1 ms.
        period_us = max(_PERIOD_US, round(1000 / cores))
        quota_us = round(period_us * cores)
        if self.version == 2:
            (group / "cpu.max").write_text(f"{quota_us} {period_us}")
        else:  # without a quota any period may be set
            (group / "cpu.cfs_quota_us").write_text("-1")
            (group / "cpu.cfs_period_us").write_text(str(period_us))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))

    def _group(self, owner: str, host: str) -> Path:
        return self.folder / f"{_PREFIX}{owner}" / host


def find_cgroup_place() -> CgroupPlace | None:
    """Return where CPU quotas can be set from here; None if nowhere."""
    return next((place for place in _cgroup_places() if _usable(place)), None)


def _cgroup_places() -> list[CgroupPlace]:
    """Yield this process's group, then the hierarchy's root: version 2 has no quotas below a group with processes."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "cpu" in controllers.split(","):
                found += [
                    CgroupPlace(root / path.lstrip("/"), 1)
                    for root in (_CGROUPS / controllers, _CGROUPS / "cpu")
                ]
            elif controllers == "" and (_CGROUPS / "cgroup.controllers").exists():
                own = _CGROUPS / path.lstrip("/")
                above = own.parent if own != _CGROUPS else own
                found += [CgroupPlace(folder, 2) for folder in (own, above, _CGROUPS)]
    return list(dict.fromkeys(place for place in found if place.folder.is_dir()))


def _usable(place: CgroupPlace) -> bool:
    if not os.access(place.folder, os.W_OK):
        return False
    if place.version == 1:
        return (place.folder / "cpu.shares").exists() or (place.folder / "cgroup.procs").exists()
    try:
        if "cpu" not in (place.folder / "cgroup.controllers").read_text().split():
            return False
        if "cpu" not in (place.folder / "cgroup.subtree_control").read_text().split():
            (place.folder / "cgroup.subtree_control").write_text("+cpu")
    except OSError:
        return False
    return True


def _remove_cgroups(folder: Path, patience_s: float) -> None:
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
