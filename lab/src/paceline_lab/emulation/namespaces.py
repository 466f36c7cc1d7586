"""Linux namespaces of an emulated host: the system calls, the host's first process, and a script that enters a host.

Rules
1. A host is one process that is number 1 of its own network, mount, host name, IPC and process namespaces.
2. Namespaces are anonymous: no name in /run/netns, no mount that others see. They last as long as a process in
   them, so the kernel removes them, and the links in them, when their last process is gone.
3. A host's first process dies with the one that made it (PR_SET_PDEATHSIG). By the kernel's rule for process
   namespaces, every process of the host dies with it. So nothing of a host outlives the laboratory, not even if all
   are killed by SIGKILL.
4. A host has its own /proc (process ids are its own), host name and /etc/hosts; it shares all other files.
5. `python -I -S namespaces.py PID GROUP COMMAND...` runs a command inside a host. PID is the host's first process.
   GROUP is a cgroup's list of processes to join, or `-`. It waits for the command, passes signals on and leaves with
   its exit code; the command dies with it.
6. Standard library only, and little of it: as a script this starts in 20 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

TYPE_CHECKING = False  # type checkers take it for true; importing typing would make the script a tenth slower
if TYPE_CHECKING:
    from typing import NoReturn

# ---- system calls that Python's standard library lacks before 3.12

NEW_USER = 0x10000000
NEW_NET = 0x40000000
_NEW_MOUNT = 0x00020000
_NEW_UTS = 0x04000000
_NEW_IPC = 0x08000000
_NEW_PID = 0x20000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_PR_SET_PDEATHSIG, _PR_SET_TIMERSLACK, _MNT_DETACH = 1, 29, 2

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(kinds: int) -> None:
    """Leave this process's namespaces of these kinds for new ones."""
    _checked(_libc.unshare(kinds), "unshare")


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however it ends."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0), "prctl")
    if os.getppid() not in (parent, 0):  # it ended before we asked; 0: it is outside our process namespace
        os.kill(os.getpid(), signal.SIGKILL)


def sleep_exactly() -> None:
    """Have timers of this process fire when they are due; the kernel may otherwise be 50 us late."""
    _checked(_libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0), "prctl")


def _set_namespace(file: int, kind: int) -> None:
    _checked(_libc.setns(file, kind), "setns")


def _mount(source: str, target: str, kind: str = "", flags: int = 0) -> None:
    result = _libc.mount(source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), None)
    _checked(result, f"mount {target}")


def _unmount(target: str) -> None:
    """Detach what is mounted here: at once for new users, for present ones when they let go."""
    _checked(_libc.umount2(target.encode(), _MNT_DETACH), f"umount {target}")


def _set_host_name(name: str) -> None:
    _checked(_libc.sethostname(name.encode(), ctypes.c_size_t(len(name.encode()))), "sethostname")


def _checked(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


# ---- a host's first process


def start_host(name: str, hosts_text: str) -> int:
    """Start a host and return the process id of its first process, as seen from here.

    Args:
        name: Host name.
        hosts_text: Text of its /etc/hosts.

    Raises:
        OSError: The kernel refused; the text says which call.
    """
    ready, report = os.pipe()
    laboratory = os.getpid()
    middle = os.fork()
    if middle == 0:
        _become_host(name, hosts_text, laboratory, report)
    os.close(report)
    with os.fdopen(ready) as lines:
        fields = dict(line.rstrip("\n").split(" ", 1) for line in lines)
    if "ready" not in fields or "pid" not in fields:
        os.waitpid(middle, 0)
        number, _, text = fields.get("failed", "0 it died without a message").partition(" ")
        raise OSError(int(number), text)
    return int(fields["pid"])


def forget_the_laboratory(*keep: int) -> None:
    """Close all files but `keep` in a forked child, and let signals act as usual again.

    The owner sees the laboratory's end by its socket, which no child may hold open.
    """
    first = 3
    for file in sorted(keep):
        os.closerange(first, file)
        first = file + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def inside(pid: int, home: int) -> Iterator[None]:
    """Enter the network of the host whose first process is `pid`; afterwards return to `home`, an open namespace."""
    network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        _set_namespace(network, NEW_NET)
        yield
    finally:
        os.close(network)
        _set_namespace(home, NEW_NET)


def _become_host(name: str, hosts_text: str, laboratory: int, report: int) -> NoReturn:
    """Fork the host's first process and wait for it. A process of a new PID namespace has to be a child: hence two."""
    try:
        forget_the_laboratory(report)
        die_with_parent(laboratory)
        unshare(NEW_NET | _NEW_MOUNT | _NEW_UTS | _NEW_IPC | _NEW_PID)
        start, go = os.pipe()
        first = os.fork()
        if first == 0:
            die_with_parent(0)
            os.close(go)
            if os.read(start, 1):  # else the middle process died before the kernel knew what to do then
                _furnish(name, hosts_text)
                os.write(report, b"ready .\n")
                os.close(report)
                _reap_for_ever()
            os._exit(0)
        os.write(report, f"pid {first}\n".encode())
        os.close(report)
        os.write(go, b"!")
        os.waitpid(first, 0)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.write(report, f"failed {error.errno} {error.strerror}\n".encode())
    os._exit(0)


def _furnish(name: str, hosts_text: str) -> None:
    """The host's own /etc/hosts and /proc. The file lies in memory, in a file system that only its mount keeps."""
    _mount("none", "/", flags=_MS_REC | _MS_PRIVATE)
    if Path("/etc/hosts").exists():
        # Any folder serves; this one is covered by the next mount anyway.
        _mount("tmpfs", "/proc", "tmpfs")
        Path("/proc/hosts").write_text(hosts_text)
        _mount("/proc/hosts", "/etc/hosts", flags=_MS_BIND)
        _unmount("/proc")
    _mount("proc", "/proc", "proc")
    _set_host_name(name)


def _reap_for_ever() -> NoReturn:
    """Wait for processes whose parents are gone, as process 1 of a system has to."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        signal.sigwait({signal.SIGCHLD})
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


# ---- the script that enters a host

_ORDER = (
    ("user", NEW_USER),
    ("ipc", _NEW_IPC),
    ("uts", _NEW_UTS),
    ("net", NEW_NET),
    ("pid", _NEW_PID),
    ("mnt", _NEW_MOUNT),
)


def command_inside(pid: int, group: str, command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command` in a host (rule 5)."""
    return [sys.executable, "-I", "-S", __file__, str(pid), group, *command]


def _join(pid: str) -> None:
    """Become a process of the host; the working folder stays, because the host shares the files."""
    folder = Path.cwd()
    files = [(kind, os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY)) for name, kind in _ORDER]
    for kind, file in files:
        ours = kind == NEW_USER and os.path.sameopenfile(file, os.open("/proc/self/ns/user", os.O_RDONLY))
        if not ours:  # the kernel refuses to join the user namespace one is in
            _set_namespace(file, kind)
        os.close(file)
    os.chdir(folder)


def _run_inside(pid: str, group: str, command: list[str]) -> int:
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
        die_with_parent(0)
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
    sys.exit(_run_inside(sys.argv[1], sys.argv[2], sys.argv[3:]))
