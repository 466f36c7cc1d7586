"""The watchdog: a supervisor process that ends a launch's ranks if the launcher dies, even by SIGKILL.

Rules
1. The watchdog reads its standard input, a pipe whose other end only the launcher holds. The kernel closes
   that end however the launcher dies, SIGKILL included.
2. `done` before the end of the pipe means that every rank ended well: the watchdog exits without searching for any.
3. Otherwise it ends every process that carries the launch's mark in its environment, descendants of ranks
   (data loaders, say) included: SIGTERM, a grace, SIGKILL.
4. Either way it then removes the launch's folder of temporary files. If watchdog and launcher are killed together, the
   next launch does: the folder's name says who owned it.
5. This file runs as a plain script and imports only the standard library: it costs milliseconds.

Limits: Linux, where /proc shows a process's environment; elsewhere it does nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

MARK = "PACELINE_LAUNCH_ID"
GRACE_S = 5.0
_PAUSE_S = 0.02
_PREFIX = "paceline-run-"


class Watchdog:
    """The launcher's handle on its watchdog; a context manager around the launch."""

    def __init__(self, launch_id: str) -> None:
        self._launch_id = launch_id
        self._folder = Path(tempfile.gettempdir(), f"{_PREFIX}{_identity(os.getpid())}.{launch_id}")

    @property
    def folder(self) -> Path:
        """For temporary files of the launch, made when first asked for; gone afterwards."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        return self._folder

    def __enter__(self) -> Self:
        remove_orphans()
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, self._launch_id, str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C in the terminal must not reach it
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The watchdog may be gone if someone killed it; then nobody reads the pipe.
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(b"done" if kind is None else b"")


def remove_orphans() -> None:
    """Remove the folders of launches whose launcher, watchdog and ranks are gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*.*.*.*"):
        namespace, pid, _, launch_id = folder.name.removeprefix(_PREFIX).split(".", 3)
        owner = folder.name.removeprefix(_PREFIX).rpartition(".")[0]
        is_ours = namespace == _identity(os.getpid()).partition(".")[0] and pid.isdigit()
        if is_ours and owner != _identity(int(pid)) and not marked(launch_id):
            shutil.rmtree(folder, ignore_errors=True)


def _identity(pid: int) -> str:
    """The namespace, number and start time of a process, so that a reused number is not taken for it."""
    with contextlib.suppress(OSError, IndexError):
        namespace = Path("/proc/self/ns/pid").stat().st_ino
        started = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
        return f"{namespace}.{pid}.{started}"
    return f"0.{pid}.0"


def marked(launch_id: str) -> list[int]:
    """Process ids whose environment carries this launch's mark."""
    needle = f"{MARK}={launch_id}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is somebody else's
            if needle in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def end_all(launch_id: str, grace_s: float = GRACE_S) -> None:
    """End every marked process: SIGTERM first, SIGKILL for those still there after `grace_s`."""
    deadline_s = time.monotonic() + grace_s
    told: set[int] = set()
    while pids := marked(launch_id):
        late = time.monotonic() > deadline_s
        for pid in pids:
            if late or pid not in told:
                told.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    if sys.stdin.buffer.read() != b"done":
        end_all(sys.argv[1])
    shutil.rmtree(sys.argv[2], ignore_errors=True)
