"""The stack of a process that does not answer, read from outside, and what the kernel says it waits for.

Rules
1. py-spy first, where it is installed: it reads the process's memory, also while another thread holds the GIL.
2. Otherwise a signal, to which faulthandler answers within the process, GIL or not. It comes last, because a signal may
   end the very wait that is looked at. It is sent only to a process that handles it, since it would end any other.
3. A process that is stopped is neither paused nor signalled.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.host.processes import is_stopped, state_of

_PY_SPY_S, _ANSWER_S, _PAUSE_S = 5.0, 1.0, 0.02
_SIGNAL = signal.SIGRTMIN + 7  # few programs use it, unlike SIGUSR1 and SIGUSR2
_PR_SET_PTRACER = 0x59616D61
_STATES = {"D": "waits for a disk", "T": "is stopped", "t": "is stopped by a debugger", "Z": "has ended"}
# What the kernel calls the places in which a thread sleeps, and what that is to a reader.
_PLACES = {
    "hrtimer_nanosleep": "sleeps",
    "futex_": "waits for a lock",
    "do_poll": "waits for a socket or a pipe",
    "poll_schedule": "waits for a socket or a pipe",
    "do_select": "waits for a socket or a pipe",
    "ep_poll": "waits for a socket or a pipe",
    "pipe_read": "reads from a pipe",
    "anon_pipe_read": "reads from a pipe",
    "sk_wait_data": "reads from a socket",
    "wait_woken": "waits for a socket",
    "do_wait": "waits for a child process",
}
_answers: list[object] = []  # files that faulthandler writes to; they must stay open


@dataclass(frozen=True)
class Frame:
    """A Python function that has not returned yet."""

    function: str
    file: str
    line: int

    @property
    def is_of_user(self) -> bool:
        """Return whether it belongs to no installed package, nor to Python or to us."""
        installed = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), "<")
        return "-packages/" not in self.file and not self.file.startswith(installed)

    def __str__(self) -> str:
        return f"{self.function} ({'/'.join(Path(self.file).parts[-2:])}:{self.line})"


@dataclass(frozen=True)
class Stack:
    """The stack of a process's main thread."""

    frames: tuple[Frame, ...]  # innermost first; none if they could not be read
    by: str  # what read them, or why nothing could
    kernel: str  # what the thread does in the kernel's words; "" where it does not say


def answer_signals(folder: Path) -> None:
    """Let the launcher of this process read its stack: by the signal, into a file there, and by py-spy. Local."""
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
        file = _answer_file(folder, os.getpid()).open("w")
        faulthandler.register(_SIGNAL, file=file, all_threads=True)
        _answers.append(file)
    with contextlib.suppress(OSError, AttributeError):  # Yama lets only ancestors look, and py-spy is none
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, os.getppid(), 0, 0, 0)


def stack_of(pid: int, folder: Path | None = None) -> Stack:
    """Read the stack of a process. It answers a signal in `folder`; without one no signal is sent. Blocks up to 6 s."""
    kernel = kernel_words(pid)
    frames, by = _by_py_spy(pid)
    if not frames and folder is not None and not is_stopped(state_of(pid)):
        found, why = _by_signal(pid, folder)
        frames, by = found, (why if found else f"{by}; {why}")
    return Stack(tuple(frames), by, kernel)


def kernel_words(pid: int) -> str:
    """Return what the process's main thread does in the kernel: in words, and by the kernel's name."""
    state = state_of(pid)
    if state in _STATES:
        return _STATES[state] if state != "T" else f"is stopped by a signal (kill -CONT {pid} continues it)"
    if state == "R":
        return "computes"
    with contextlib.suppress(OSError):
        place = Path(f"/proc/{pid}/wchan").read_text().strip()
        words = next(
            (words for name, words in _PLACES.items() if place.startswith(name)), "sleeps in the kernel"
        )
        return f"{words} ({place})" if place not in ("", "0") else ""
    return ""


def py_spy() -> str | None:
    """Return the path of py-spy, from PATH or beside this Python; None if it is not installed."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=sysconfig.get_path("scripts"))


def _by_py_spy(pid: int) -> tuple[list[Frame], str]:
    program = py_spy()
    if program is None:
        return [], "py-spy is not installed (pip install py-spy)"
    words = [program, "dump", "--json", "--pid", str(pid)]
    if is_stopped(state_of(pid)):
        words.append("--nonblocking")  # else py-spy would continue it
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_PY_SPY_S, check=True)
        threads = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or ["nothing"]
        return [], f"py-spy said: {said[0].removeprefix('Error: ')}"
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return [], f"py-spy failed: {type(error).__name__}"
    for thread in threads:
        if thread.get("os_thread_id") == pid or thread.get("thread_name") == "MainThread":
            frames = [Frame(x["name"], x["filename"], int(x["line"])) for x in thread.get("frames", [])]
            return frames, "py-spy" if frames else "py-spy saw no Python function"
    return [], "py-spy found no main thread"


def _by_signal(pid: int, folder: Path) -> tuple[list[Frame], str]:
    path = _answer_file(folder, pid)
    if not _handles(pid, _SIGNAL) or not path.exists():
        return [], "it does not answer signals"
    before = path.stat().st_size
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, _SIGNAL)
    until_s = time.monotonic() + _ANSWER_S
    text = ""
    while time.monotonic() < until_s:
        now = path.read_text(errors="replace")[before:]
        if now and now == text:  # it has been written to the end
            break
        text = now
        time.sleep(_PAUSE_S)
    # Of all threads, the one that took the signal: the main thread, unless it blocks signals.
    own = re.search(
        r"^Current thread .*?\n(.*?)(?=^(?:Thread|Current thread) |\Z)", text, re.DOTALL | re.MULTILINE
    )
    lines = re.findall(r'File "(.*?)", line (\d+) in (\S+)', own[1] if own else "")
    frames = [Frame(name, file, int(line)) for file, line, name in lines]
    return frames, f"faulthandler{'' if frames else ' saw none'}, after a signal"


def _answer_file(folder: Path, pid: int) -> Path:
    return folder / f"stack.{pid}"


def _handles(pid: int, number: int) -> bool:
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
