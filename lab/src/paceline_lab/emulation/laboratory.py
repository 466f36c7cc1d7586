"""The laboratory: the process that builds an emulated cluster, holds it and takes it down.

Started as `python -m paceline_lab.emulation.laboratory OWNER SOCKET`; one JSON object a line in both directions. The
first line is the spec; the answer says what was made, or why not. Then requests: `counters`, `change`.

Rules
1. The owner's end of the socket is the cluster's life: when it closes, however the owner died, everything goes.
2. The laboratory is a process of its own because it moves into other namespaces, which a process with threads, such
   as the owner's, cannot.
3. Its own network namespace is the switch. Hosts die with it (see `namespaces`), so a killed laboratory leaves
   nothing but empty cgroups and a folder, which the next start removes (see `owned_resources`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline_lab.emulation import namespaces, owned_resources
from paceline_lab.emulation.cluster_spec import ClusterSpec
from paceline_lab.emulation.scenario import Change
from paceline_lab.errors import UnsupportedError

if TYPE_CHECKING:
    from paceline_lab.emulation.network import Network

_REFUSED = (errno.EPERM, errno.EACCES)


class Laboratory:
    """An emulated cluster, as the process that holds it sees it.

    Args:
        spec: The cluster.
        owner_id: Id of the owner.
    """

    def __init__(self, spec: ClusterSpec, owner_id: str) -> None:
        self._spec = spec
        self._owner = owner_id
        self._pids: list[int] = []
        self._network: Network | None = None
        self._folder = owned_resources.make_folder(self._owner)
        self._place: owned_resources.CgroupPlace | None = None

    def build(self) -> dict[str, Any]:
        """Make the cluster; the answer names what the owner needs."""
        groups = self._limit_cores()
        _isolate()
        # Only now: a socket belongs to the namespace it was opened in.
        from paceline_lab.emulation.network import Network, address  # noqa: PLC0415

        names = [host_name(host) for host in range(self._spec.hosts)]
        addresses = [address(self._spec, host) for host in range(self._spec.hosts)]
        for name in names:
            with _allowed(
                "hosts with namespaces and a /proc of their own, which in a container takes --privileged"
            ):
                self._pids.append(namespaces.start_host(name, _hosts_text(names, addresses)))
        for group, pid in zip(groups, self._pids, strict=True):
            if group is not None:
                group.write_text(str(pid))
        self._network = Network(self._spec, self._pids)
        self._network.build()
        hosts = [
            {"name": name, "address": address_, "pid": pid, "group": "-" if group is None else str(group)}
            for name, address_, pid, group in zip(names, addresses, self._pids, groups, strict=True)
        ]
        return {"hosts": hosts, "folder": str(self._folder)}

    def answer(self, request: dict[str, Any]) -> Any:
        """Carry out a request."""
        if self._network is None:
            raise ValueError("nothing has been built")
        if request["do"] == "counters":
            return self._network.counters()
        if request["do"] == "change":
            self._change(Change(**{name: value for name, value in request.items() if name != "do"}))
            return None
        raise ValueError(f"no request {request['do']!r}")

    def close(self) -> None:
        """End every host and wait until its processes are gone; then the groups can be removed."""
        wires = [] if self._network is None else [wire.pid for wire in self._network.wires.values()]
        for pid in (*self._pids, *wires):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
        owned_resources.remove(self._owner)

    def _change(self, change: Change) -> None:
        self._spec = change.applied_to(self._spec)
        for host in range(self._spec.hosts) if change.host is None else [change.host]:
            if change.kind != "cores":
                assert self._network is not None
                self._network.change(change, host)
            elif self._place is not None:
                self._place.set_quota(self._owner, host_name(host), change.value)

    def _limit_cores(self) -> list[Path | None]:
        """Make a group with a quota for each host, if any host has one, since a change may limit the others later."""
        cores = self._spec.cores
        if all(limit is None for limit in cores):
            return [None] * len(cores)
        place = self._place = owned_resources.find_cgroup_place()
        if place is None:
            raise UnsupportedError(
                "--cpu needs a cgroup with the cpu controller that this user may write to, and there is none. Run as "
                "root, or leave --cpu out. Nothing was created."
            )
        with _allowed("--cpu, which takes a cgroup with a quota"):
            return [place.limit(self._owner, host_name(host), limit) for host, limit in enumerate(cores)]


def host_name(host: int) -> str:
    """Return the name of a host in messages, which is also its own host name."""
    return f"host{host}"


@contextlib.contextmanager
def _allowed(what: str) -> Iterator[None]:
    """Raise an error that names `what`, if the kernel refuses it."""
    try:
        yield
    except OSError as error:
        raise UnsupportedError(
            f"this machine does not allow {what} ({error.strerror}). Nothing was created."
        ) from error


def _isolate() -> None:
    """Move into a new network namespace: as root, or within a user namespace in which this process is root."""
    try:
        try:
            namespaces.unshare(namespaces.NEW_NET)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            user, group = os.geteuid(), os.getegid()
            namespaces.unshare(namespaces.NEW_USER | namespaces.NEW_NET)
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    except OSError as error:
        raise UnsupportedError(
            "emulating hosts needs root, or a kernel that lets users make namespaces, and here it does not "
            f"({error.strerror}). Run as root; in a container: with --privileged. Or set "
            "kernel.unprivileged_userns_clone=1 and kernel.apparmor_restrict_unprivileged_userns=0 where those exist. "
            "Nothing was created."
        ) from error


def _hosts_text(names: list[str], addresses: list[str]) -> str:
    # The second form is how torch's store, which listens on IPv6 sockets, sees and looks up a peer.
    forms = ("{} {}", "::ffff:{} {}")
    lines = [form.format(*pair) for form in forms for pair in zip(addresses, names, strict=True)]
    return "\n".join(["127.0.0.1 localhost", *lines, ""])


def serve(owner_id: str, connection: socket.socket) -> None:
    """Build the cluster of the first line, answer the requests that follow, and take it down when they end."""
    owner = _watch(os.getppid())
    with connection, connection.makefile("rw") as lines:

        def reply(what: dict[str, Any]) -> None:
            with contextlib.suppress(BrokenPipeError):
                lines.write(json.dumps(what) + "\n")
                lines.flush()

        laboratory = Laboratory(ClusterSpec.from_json(lines.readline()), owner_id)
        try:
            try:
                reply({"built": laboratory.build()})
                while _owner_lives(connection, owner) and (line := lines.readline()):
                    reply({"answer": laboratory.answer(json.loads(line))})
            except UnsupportedError as error:
                reply({"refused": str(error)})
            except Exception as error:  # noqa: BLE001 - whatever it is, the owner has to be told
                reply({"failed": f"{type(error).__name__}: {error}"})
        finally:
            laboratory.close()


def _watch(pid: int) -> int | None:
    """An open file that says when a process has ended; None where the kernel has none."""
    with contextlib.suppress(OSError, AttributeError):
        return os.pidfd_open(pid)
    return None


def _owner_lives(connection: socket.socket, owner: int | None) -> bool:
    """Wait for a request or the owner's end; its socket alone may be kept open by a child it forked."""
    files: list[socket.socket | int] = [connection] if owner is None else [connection, owner]
    ready, _, _ = select.select(files, [], [])
    return owner not in ready


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the owner decides when it is over
    serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
