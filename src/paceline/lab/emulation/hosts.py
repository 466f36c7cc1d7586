"""A host: one process that is number 1 of its own network, mount, name, IPC and process namespaces.

Rules
1. Namespaces are anonymous: no name in /run/netns, no mount that others see. They last as long as a process in
   them, so the kernel removes them, and the links in them, when their last process is gone.
2. The host's first process dies with the one that made it (PR_SET_PDEATHSIG), and with it, by the kernel's rule for
   process namespaces, every process of the host. So nothing of a host outlives the laboratory, not even if
   everybody is killed by SIGKILL.
3. A host has its own /proc (process ids are its own), host name and /etc/hosts; it shares all other files.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from paceline.lab.emulation import kernel


def start_host(name: str, hosts_text: str) -> int:
    """Start a host and return the process id of its first process, as seen from here.

    Raises:
        OSError: The kernel refused; the text says which call.
    """
    ready, report = os.pipe()
    lab = os.getpid()
    middle = os.fork()
    if middle == 0:
        _become_host(name, hosts_text, lab, report)
    os.close(report)
    with os.fdopen(ready) as lines:
        words = dict(line.rstrip("\n").split(" ", 1) for line in lines)
    if "ready" not in words or "pid" not in words:
        os.waitpid(middle, 0)
        number, _, text = words.get("failed", "0 it died without a word").partition(" ")
        raise OSError(int(number), text)
    return int(words["pid"])


@contextlib.contextmanager
def inside(pid: int, home: int) -> Iterator[None]:
    """Be in the network of the host whose first process is `pid`; afterwards back in `home`, an open namespace."""
    network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        kernel.enter(network, kernel.NEW_NET)
        yield
    finally:
        os.close(network)
        kernel.enter(home, kernel.NEW_NET)


def _become_host(name: str, hosts_text: str, lab: int, report: int) -> NoReturn:
    """The middle process waits for the host's first one: its child, so that both die in order."""
    try:
        forget_the_lab(report)
        kernel.die_with_parent(lab)
        kernel.unshare(kernel.NEW_NET | kernel.NEW_MOUNT | kernel.NEW_UTS | kernel.NEW_IPC | kernel.NEW_PID)
        start, go = os.pipe()
        first = os.fork()
        if first == 0:
            kernel.die_with_parent(0)
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


def forget_the_lab(*keep: int) -> None:
    """Close the laboratory's files and default its signals: the owner must see the laboratory's end, not ours."""
    first = 3
    for file in sorted(keep):
        os.closerange(first, file)
        first = file + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _furnish(name: str, hosts_text: str) -> None:
    """The host's own /etc/hosts and /proc. The file lies in memory, in a file system that only its mount keeps."""
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    if Path("/etc/hosts").exists():
        # Any folder serves; this one is covered by the next mount anyway.
        kernel.mount("tmpfs", "/proc", "tmpfs")
        Path("/proc/hosts").write_text(hosts_text)
        kernel.mount("/proc/hosts", "/etc/hosts", flags=kernel.MS_BIND)
        kernel.detach("/proc")
    kernel.mount("proc", "/proc", "proc")
    socket.sethostname(name)


def _reap_for_ever() -> NoReturn:
    """What the first process of a system is for: to wait for those whose parents are gone."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        signal.sigwait({signal.SIGCHLD})
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
