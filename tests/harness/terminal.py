"""Runs commands as a user types them: real processes, each with a deadline and a check for leftovers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import warm

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE_S = 100.0
_MARK = "PACELINE_TERMINAL"
TORCHS_ABORT = "terminate called without an active exception"  # see docs/troubleshooting.md


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    code: int
    out: str
    err: str


def paceline(*words: str, cwd: Path, env: Mapping[str, str] | None = None, cold: bool = False) -> Finished:
    """Run `paceline WORDS...` to its end; fails if it leaves a process behind."""
    return run(["paceline", *words], cwd=cwd, env=env, cold=cold)


def run(
    command: Sequence[str],
    cwd: Path,
    env: Mapping[str, str] | None = None,
    *,
    cold: bool = False,
    temporary: Path | None = None,
) -> Finished:
    """Run a command to its end; fails if it leaves a process behind.

    Args:
        command: Its first word is looked up on a user's PATH.
        cwd: Where.
        env: Added to the environment.
        cold: Whether every `python`, `paceline` and `torchrun` is a fresh interpreter; otherwise see `warm.py`.
        temporary: Where temporary files go, in a folder `tmp`; by default `cwd`.
    """
    with started(command, cwd, env, cold=cold, temporary=temporary) as process:
        out, err = process.communicate(timeout=DEADLINE_S)
        left = alive(process)
    assert not left, f"{command} left {left} behind"
    return Finished(process.returncode, out, err)


class Started(subprocess.Popen[str]):
    """A command under way; its environment carries a mark, and so do those of what it starts."""

    mark: str


@contextlib.contextmanager
def started(
    command: Sequence[str],
    cwd: Path,
    env: Mapping[str, str] | None = None,
    *,
    cold: bool = False,
    temporary: Path | None = None,
) -> Iterator[Started]:
    """Start a command in a new session. Processes of it that live at the end are killed."""
    mark = uuid.uuid4().hex
    process = Started(
        command,
        cwd=cwd,
        env=environment(temporary or cwd, cold=cold) | {_MARK: mark} | dict(env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    process.mark = mark
    try:
        yield process
    finally:
        has_ended = False
        while not has_ended:  # a launcher may replace a rank before its own turn comes
            for pid in alive(process):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=0.2)
                has_ended = True


def environment(tmp: Path, *, cold: bool = False) -> dict[str, str]:
    """Return a user's environment: this Python's programs first on the PATH, temporary files where a test can look."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PET_", "LOGLEVEL", "TORCH", "PYTHONUNBUFFERED"))
    }
    folder = tmp / "tmp"
    folder.mkdir(exist_ok=True)
    programs = Path(sys.executable).parent if cold else warm.folder()
    path = os.pathsep.join((str(programs), str(Path(sys.executable).parent), env.get("PATH", "")))
    # A width, because rich would otherwise wrap at 80 columns and split the words a test looks for.
    return env | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder), "COLUMNS": "200", "PATH": path}


def alive(process: Started) -> dict[int, str]:
    """Return the command lines of the living processes among `process` and its descendants, by process id."""
    needle = f"{_MARK}={process.mark}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if needle in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found
