"""`EmulatedCluster`: emulated hosts on this machine, as a context manager that builds and removes them.

Rules
1. The cluster belongs to this process. When the process ends, even by SIGKILL, its hosts, links and processes end
   with it. The laboratory (see `laboratory`) keeps them only while this process holds its end of a socket.
2. Namespaces have no names, so two emulations cannot collide; what has one carries its owner (see `owned_resources`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import paceline
import paceline_lab
from paceline.errors import ConfigurationError
from paceline_lab.emulation import namespaces, owned_resources
from paceline_lab.emulation.cluster_job import Job, Outcome
from paceline_lab.emulation.cluster_spec import ClusterSpec
from paceline_lab.emulation.scenario import Change, Director, Scenario
from paceline_lab.errors import EmulationError, UnsupportedError

if TYPE_CHECKING:
    from typing_extensions import Self

_PATIENCE_S = 60.0
_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


@dataclass(frozen=True)
class Counters:
    """The traffic of all links of one host since the start.

    Attributes:
        sent_bytes: Bytes with Ethernet headers that reached the switch from the host.
        sent_packets: The same in packets.
        received_bytes: Bytes with Ethernet headers that the switch passed on to the host.
        received_packets: The same in packets.
        lost_packets: Packets from the host that were lost at random.
        port_drops: Packets for the host that did not fit into its switch port's queue.
        host_drops: Packets that did not fit into the host's own queue.
        wire_drops: Packets that the emulation itself lost, because this machine was too slow for a user-space delay.
        marked_packets: Packets for the host that got an ECN mark.
        not_ecn_drops: Packets for the host that were dropped instead of marked.
        retransmits: TCP segments that the host sent more than once.
    """

    sent_bytes: int
    sent_packets: int
    received_bytes: int
    received_packets: int
    lost_packets: int
    port_drops: int
    host_drops: int
    wire_drops: int
    marked_packets: int
    not_ecn_drops: int
    retransmits: int


class EmulatedHost:
    """One host of a cluster.

    Attributes:
        index: Number of the host.
        name: Host name, which the other hosts know.
        address: Address of the host.
        interface: The interface that has it.
        hosts_file: Its /etc/hosts, as this machine sees it.
    """

    def __init__(self, cluster: EmulatedCluster, index: int, made: Mapping[str, Any]) -> None:
        self._cluster = cluster
        self._made = made
        self.index = index
        self.name: str = made["name"]
        self.address: str = made["address"]
        self.interface = cluster.spec.interface
        self.hosts_file = Path(f"/proc/{made['pid']}/root/etc/hosts")

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` inside this host; it passes on signals and the exit code."""
        return namespaces.command_inside(self._made["pid"], self._made["group"], argv)

    def set_link(self, *, up: bool, link: int = 0) -> None:
        """Take one of the host's links down at the switch, or up again."""
        self._cluster.change(Change("link", self.index, float(up), link))

    def set_cores(self, cores: str) -> None:
        """Give the host other cores, as --cpu: `50%`. It needs some from the start."""
        self._cluster.change(Change.parse("cores", self.index, cores))

    def set_rate(self, rate: str) -> None:
        """Give the host's links another rate, in both directions, as --rate: `100Mbit`. What queues stays queued."""
        self._cluster.change(Change.parse("rate", self.index, rate))

    def set_loss(self, loss: str) -> None:
        """Have the switch lose other packets of the host, as --loss: `1%`. It needs a cluster without offload."""
        self._cluster.change(Change.parse("loss", self.index, loss))


class EmulatedCluster:
    """Hosts on this machine; a context manager.

    Limits first: Linux; root, or a kernel that lets users make namespaces; IPv4.

    Args:
        spec: What to emulate.

    Attributes:
        spec: The same, with what was changed since.
        hosts: The hosts, while the cluster stands.
        folder: Folder for temporary files, which goes with the cluster.

    Raises:
        ConfigurationError: On entry, before anything is made: the kernel does not have what the spec names.
        UnsupportedError: On entry: the rights or the kernel do not allow it.
        EmulationError: On entry: building failed; nothing is left.
    """

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self.hosts: list[EmulatedHost] = []
        self._asking = threading.Lock()

    def __enter__(self) -> Self:
        _check_machine(self.spec)
        owned_resources.remove_orphans()
        self._id = owned_resources.new_owner_id()
        ours, theirs = socket.socketpair()
        with theirs:
            self._laboratory = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "paceline_lab.emulation.laboratory",
                    self._id,
                    str(theirs.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in the terminal must not reach it
                env=_environment(),
            )
        self._socket = ours
        self._lines = ours.makefile("rw")
        try:
            built = self._receive_after(self.spec.to_json())["built"]
        except BaseException:
            self._close()
            raise
        self.folder = Path(built["folder"])
        self.hosts = [EmulatedHost(self, i, made) for i, made in enumerate(built["hosts"])]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def run(
        self,
        argv: Sequence[str],
        *,
        on_line: Callable[[int, int | None, str], None] | None = None,
        timeout_s: float | None = None,
        environment: Mapping[str, str] | None = None,
        scenario: Scenario | None = None,
    ) -> Outcome:
        """Run a script on every rank: one agent a host, as `torchrun --nnodes` on real hosts.

        Args:
            argv: Words after torchrun's own flags: a script and its arguments, or `-m`, a module and its own.
            on_line: Called for every line of output, from one thread at a time: host's index, rank (None: the host's
                agent), text. None prints each line with its prefix.
            timeout_s: The job is ended after this long.
            environment: Added to the ranks'.
            scenario: Changes during the job; told as lines of no host (-1).

        Contract:
            Blocks: until every host's agent has ended. A host that fails ends the others after a grace in which
            they can say why themselves. Afterwards no process of the job is left.

        Raises:
            ConfigurationError: There is nothing to run, or the scenario is not possible; nothing was started.
            EmulationError: The cluster was lost.
        """
        on_line = on_line or print_line
        before = self.counters()
        with contextlib.ExitStack() as stack:
            listen = on_line
            if scenario is not None:
                scenario.check(self.spec)
                listen = stack.enter_context(_directed(scenario, self, on_line))
            started = Job(self, argv, listen, environment or {})
            try:
                outcome = started.wait(timeout_s)
            finally:
                started.close()
        carried = (_difference(new, old) for new, old in zip(self.counters(), before, strict=True))
        return replace(outcome, counters=tuple(carried))

    def change(self, change: Change) -> None:
        """Change a property of a host, or of all, from now on.

        Raises:
            ConfigurationError: The cluster cannot have it; nothing was changed.
        """
        changed = change.applied_to(self.spec)
        self._ask({"do": "change", **asdict(change)})
        self.spec = changed

    def set_delay(self, delay: str) -> None:
        """Have packets meet another delay, as --delay: `5ms`. It needs one from the start."""
        self.change(Change.parse("delay", None, delay))

    def counters(self) -> list[Counters]:
        """Return what each host's links carried since the cluster was built."""
        return [Counters(**record) for record in self._ask({"do": "counters"})]

    def _ask(self, request: Mapping[str, Any]) -> Any:
        with self._asking:  # a scenario's thread asks, too
            return self._receive_after(json.dumps(request))["answer"]

    def _receive_after(self, line: str) -> dict[str, Any]:
        try:
            self._lines.write(line + "\n")
            self._lines.flush()
            reply = self._lines.readline()
        except OSError:
            reply = ""
        if not reply:
            code = self._laboratory.wait(_PATIENCE_S)
            raise EmulationError(
                f"the laboratory that holds the emulated hosts is gone (exit code {code}); the hosts went with it. "
                "Somebody may have killed it, or the machine ran out of memory."
            )
        answer: dict[str, Any] = json.loads(reply)
        if "refused" in answer:
            raise UnsupportedError(answer["refused"])
        if "failed" in answer:
            raise EmulationError(
                f"the emulated cluster failed: {answer['failed']}. Nothing of it is left. "
                "`paceline explain the emulated cluster failed` says more."
            )
        return answer

    def _close(self) -> None:
        self.hosts = []
        with contextlib.suppress(OSError):
            self._lines.close()
        self._socket.close()
        if self._laboratory.wait(_PATIENCE_S) != 0:  # it was killed: what it would have removed is left to us
            owned_resources.remove(self._id)


@contextlib.contextmanager
def _directed(
    scenario: Scenario, cluster: EmulatedCluster, on_line: Callable[[int, int | None, str], None]
) -> Iterator[Callable[[int, int | None, str], None]]:
    """Run the scenario inside the block. Its changes become lines between those of the ranks."""
    printing = threading.Lock()

    def show(host: int, rank: int | None, text: str) -> None:
        with printing:
            on_line(host, rank, text)

    with Director(scenario, cluster.change, lambda text: show(SCENARIO, None, text)) as director:

        def listen(host: int, rank: int | None, text: str) -> None:
            if rank is not None:
                director.hear(text)
            show(host, rank, text)

        yield listen


SCENARIO = -1  # the number that lines of a scenario carry in place of a host's


def print_line(host: int, rank: int | None, text: str, stream: IO[str] | None = None) -> None:
    """Print a line of output behind its host and rank; to standard output unless told otherwise."""
    who = f"host{host}" if rank is None else f"host{host} rank {rank}"
    if host == SCENARIO:
        who = "scenario"
    print(f"[{who}] {text}", file=stream, flush=True)


def _check_machine(spec: ClusterSpec) -> None:
    if sys.platform != "linux":
        raise UnsupportedError("emulating hosts needs Linux's network namespaces. Nothing was created.")
    if importlib.util.find_spec("pyroute2") is None:
        raise UnsupportedError(
            "emulating hosts needs the package pyroute2: pip install pyroute2. Nothing was created."
        )
    with contextlib.suppress(FileNotFoundError):
        known = _AVAILABLE.read_text().split()
        if spec.congestion_control not in known:
            raise ConfigurationError(
                f"--congestion-control {spec.congestion_control} is not loaded here; this kernel offers "
                f"{', '.join(known)}."
            )


def _environment() -> dict[str, str]:
    """The laboratory has to find this package, from wherever it was imported."""
    sources = {str(Path(str(package.__file__)).parents[1]) for package in (paceline, paceline_lab)}
    path = [*sorted(sources), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def _difference(new: Counters, old: Counters) -> Counters:
    return Counters(**{name: value - getattr(old, name) for name, value in vars(new).items()})
