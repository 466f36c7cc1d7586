"""Whose something is: names that carry their owner, so that what an owner left can be told from what is in use.

An emulation leaves no namespace, link or process: the kernel sees to that (see `hosts`). What it could leave, if its
laboratory is killed with it, are empty cgroups and a folder of logs. Their names are `paceline-emulate-` and this id.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from pathlib import Path

PREFIX = "paceline-emulate-"


def new_id() -> str:
    """An id of this process's that was not used before.

    The process's namespace, number and start time, so that neither a reused number nor another container's is taken
    for it; then a random part, because a process may own several clusters.
    """
    return f"{_identity(os.getpid())}.{secrets.token_hex(4)}"


def is_orphan(name: str) -> bool:
    """Whether the owner in this name was a process of this namespace that has ended."""
    identity, _, _ = name.removeprefix(PREFIX).rpartition(".")
    namespace, pid, *_ = [*identity.split("."), "", ""]
    if not name.startswith(PREFIX) or namespace != _namespace() or not pid.isdigit():
        return False
    return identity != _identity(int(pid))


def make_folder(owner: str) -> Path:
    """A folder for temporary files of this owner's."""
    path = Path(tempfile.gettempdir(), f"{PREFIX}{owner}")
    path.mkdir(mode=0o700)
    return path


def remove_folder(owner: str) -> None:
    """Remove what `make_folder` made."""
    shutil.rmtree(Path(tempfile.gettempdir(), f"{PREFIX}{owner}"), ignore_errors=True)


def remove_orphaned_folders() -> list[str]:
    """Remove the folders of owners that have ended without doing so; returns their names."""
    orphans = [path for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*") if is_orphan(path.name)]
    for path in orphans:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in orphans]


def _identity(pid: int) -> str:
    return f"{_namespace()}.{pid}.{_start_time(pid)}"


def _namespace() -> str:
    with contextlib.suppress(OSError):
        return str(os.stat("/proc/self/ns/pid").st_ino)  # noqa: PTH116 - a namespace is no path
    return "0"


def _start_time(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return "gone"
