"""Run a command inside a host: `python -I -S enter.py PID GROUP COMMAND...`.

PID is the host's first process, GROUP a cgroup's list of processes to join, or `-`. Standard library only, run as a
plain script: it costs milliseconds. It waits for the command, passes signals on and leaves with its exit code; the
command dies with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import kernel  # type: ignore[import-not-found]

_ORDER = (
    ("user", kernel.NEW_USER),
    ("ipc", kernel.NEW_IPC),
    ("uts", kernel.NEW_UTS),
    ("net", kernel.NEW_NET),
    ("pid", kernel.NEW_PID),
    ("mnt", kernel.NEW_MOUNT),
)


def _join(pid: str) -> None:
    """Become a process of the host; the working folder stays, because the host shares the files."""
    folder = Path.cwd()
    files = [(kind, os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY)) for name, kind in _ORDER]
    for kind, file in files:
        ours = kind == kernel.NEW_USER and os.path.sameopenfile(
            file, os.open("/proc/self/ns/user", os.O_RDONLY)
        )
        if not ours:  # the kernel refuses to join the user namespace one is in
            kernel.enter(file, kind)
        os.close(file)
    os.chdir(folder)


def main(pid: str, group: str, command: list[str]) -> int:
    """Run the command; returns its exit code, 128 + its signal's number if one ended it."""
    if group != "-":
        Path(group).write_text(str(os.getpid()))
    try:
        _join(pid)
    except OSError as error:
        print(f"cannot enter the host: {error.strerror}", file=sys.stderr)  # noqa: T201
        return 125
    # Blocked until the child exists, so that no signal gets lost in between.
    passed_on = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
        kernel.die_with_parent(0)
        try:
            os.execvp(command[0], command)  # noqa: S606
        except OSError as error:
            print(f"{command[0]}: {error.strerror}", file=sys.stderr)  # noqa: T201
            os._exit(127)

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in passed_on:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    status = os.waitpid(child, 0)[1]
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
