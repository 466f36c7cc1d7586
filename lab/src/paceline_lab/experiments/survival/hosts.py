"""The survival training on emulated hosts with faults: agents die, cables are pulled, machines stop.

Each host runs `paceline run --nnodes N --min-ranks M`; hosts are namespaces of this machine (`emulation`). A host that
is switched off loses its cable first, so that no peer hears its kernel close connections.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline_lab.emulation import ClusterSpec, EmulatedCluster
from paceline_lab.emulation.cluster import EmulatedHost
from paceline_lab.experiments.survival.job import Job, Outcome, outcome_of_hosts, read_notes, wait_until
from paceline_lab.experiments.survival.training import Fault

_MARK = "PACELINE_SURVIVAL_HOST"
_TRAINING = "paceline_lab.experiments.survival.training"
_PORT = 29500
_POLL_S = 0.05
_ALMOST_ALL = "99.999%"  # as much as can be emulated


@dataclass(frozen=True)
class Blow:
    """A fault of a host.

    Attributes:
        host: Number of the host.
        kind: `agent killed`, `switched off`, `cut`, `half-open` (it hears, and is not heard), `agent stopped` or
            `host stopped`.
        lasts_s: Time until a cut, loss or stop ends; None: it does not end.
        after_steps: Steps that any rank has completed before it happens.
    """

    host: int
    kind: str
    lasts_s: float | None = None
    after_steps: int = 20

    def __str__(self) -> str:
        where = "first host" if self.host == 0 else "host"
        return f"{where}: {self.kind}{f' for {self.lasts_s:g} s' if self.lasts_s else ''}"


@dataclass(frozen=True)
class HostsJob:
    """The settings of a job on emulated hosts.

    Attributes:
        num_hosts: Number of hosts, each with `ranks_per_host` ranks.
        ranks_per_host: Number of ranks on each host.
        job: Options of the ranks, and `lost_after_s`, `min_ranks`, `limit_s` and `python`; its other fields are not
            used.
        blows: Faults of hosts, one after the other.
        returns: Whether hosts that were switched off or whose agent was killed are started again, by the same command.
        faults: Faults that ranks cause in themselves, each on a host.
    """

    num_hosts: int
    ranks_per_host: int
    job: Job
    blows: tuple[Blow, ...] = ()
    returns: bool = False
    faults: tuple[tuple[int, Fault], ...] = ()


@dataclass
class HostsOutcome:
    """The result of a job on emulated hosts.

    Attributes:
        outcome: Result as of a job on one host; its code is of a host that was not hit; None if any had to be ended.
        codes: Exit codes of the hosts' last launchers; None: it had to be ended.
        stalls_s: Time from each fault to the next step that was completed on any host.
        said: Output of each host's launchers.
    """

    outcome: Outcome
    codes: list[int | None]
    stalls_s: list[float]
    said: list[str]


class _Launch:
    """The launchers of a job, one a host, and their processes."""

    def __init__(self, hosts_job: HostsJob, cluster: EmulatedCluster, folder: Path) -> None:
        self._job, self._cluster, self._folder = hosts_job, cluster, folder
        self.mark, self._token = uuid.uuid4().hex, uuid.uuid4().hex
        self.processes: list[subprocess.Popen[bytes]] = []
        for host in cluster.hosts:
            (folder / f"host{host.index}").mkdir()
            self.processes.append(self.start(host))

    def start(self, host: EmulatedHost) -> subprocess.Popen[bytes]:
        job = self._job.job
        options = {
            "--nnodes": self._job.num_hosts,
            "--node-rank": host.index,
            "--master-addr": self._cluster.hosts[0].address,
            "--master-port": _PORT,
            "--local-addr": host.address,
            "--nproc-per-node": self._job.ranks_per_host,
            "--min-ranks": job.min_ranks,
            "--lost-after": f"{job.lost_after_s:g}",
        }
        command = [job.python, "-m", "paceline", "run"]
        command += [text for name, value in options.items() for text in (name, str(value))]
        command += ["-m", _TRAINING, str(self._folder / f"host{host.index}"), *job.options]
        for where, fault in self._job.faults:
            command += ["--fault", str(fault)] if where == host.index else []
        environment = {
            **os.environ,
            _MARK: f"{self.mark}-{host.index}",
            "PACELINE_TOKEN": self._token,
            "PACELINE_LAUNCH_FOLDERS": str(self._folder),  # watchdogs die with their host
            "GLOO_SOCKET_IFNAME": host.interface,
            "OMP_NUM_THREADS": "1",
        }
        with (self._folder / f"host{host.index}.txt").open("ab") as said:
            return subprocess.Popen(
                host.command(command), stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment
            )

    def pids(self, host: int, only_agent: bool = False) -> list[int]:
        """Processes of a host, as this namespace numbers them."""
        found = []
        needle = f"{_MARK}={self.mark}-{host}".encode()
        for each in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_agent = b"\0-m\0paceline\0run\0" in (each / "cmdline").read_bytes()
                if needle in (each / "environ").read_bytes().split(b"\0") and (is_agent or not only_agent):
                    found.append(int(each.name))
        return found

    def signal(self, host: int, number: signal.Signals, only_agent: bool = False) -> None:
        for pid in self.pids(host, only_agent):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def notes_of(self, what: str) -> list[float]:
        """Return when ranks noted this."""
        files = self._folder.glob("host*/rank-*.jsonl")
        return sorted(note["at"] for file in files for note in read_notes(file) if note["what"] == what)


def run_on_hosts(hosts_job: HostsJob, folder: Path) -> HostsOutcome:
    """Run it, and wait for its end. Blocks, at most the job's `limit_s` and some seconds. Needs root."""
    with EmulatedCluster(ClusterSpec(hosts_job.num_hosts, offload=False)) as cluster:
        launch = _Launch(hosts_job, cluster, folder)
        until_s = time.monotonic() + hosts_job.job.limit_s
        blows = _Blows(launch, cluster.hosts, hosts_job.returns)
        try:
            for blow in hosts_job.blows:
                blows.strike(blow, until_s)
            blows.wait(lambda: all(each.poll() is not None for each in launch.processes), until_s)
        finally:
            ended_s = time.monotonic()
            codes = [each.poll() for each in launch.processes]
            for each in launch.processes:
                each.terminate()
            wait_until(
                lambda: all(each.poll() is not None for each in launch.processes), time.monotonic() + 60
            )
            left = [pid for host in cluster.hosts for pid in launch.pids(host.index)]
            for host in cluster.hosts:
                launch.signal(host.index, signal.SIGKILL)
        done = launch.notes_of("done")
    hit = {blow.host for blow in hosts_job.blows}
    spared = [codes[i] for i in range(hosts_job.num_hosts) if i not in hit] or codes
    code = None if None in codes else next((code for code in spared if code != 0), 0)
    outcome = outcome_of_hosts(folder, code, len(left), len(blows.began_s), ended_s)
    stalls = [min((at for at in done if at > when), default=float("inf")) - when for when in blows.began_s]
    said = [(folder / f"host{i}.txt").read_text() for i in range(hosts_job.num_hosts)]
    return HostsOutcome(outcome, codes, stalls, said)


class _Blows:
    """The faults of a job's hosts: starts each after so many further steps, and ends those with a duration."""

    def __init__(self, launch: _Launch, hosts: Sequence[EmulatedHost], returns: bool) -> None:
        self._launch, self._hosts, self._returns = launch, hosts, returns
        self._ends: list[tuple[float, Blow]] = []
        self.began_s: list[float] = []

    def wait(self, happens: Callable[[], bool], until_s: float) -> bool:
        """Wait for something, and let blows end meanwhile."""
        return wait_until(lambda: self._end_what_is_due() or happens(), until_s)

    def strike(self, blow: Blow, until_s: float) -> None:
        launch, host = self._launch, self._hosts[blow.host]
        before = len(launch.notes_of("done"))
        if not self.wait(lambda: len(launch.notes_of("done")) >= before + blow.after_steps, until_s):
            return
        self.began_s.append(time.monotonic())
        if blow.kind in ("cut", "switched off"):
            host.set_link(up=False)
        if blow.kind == "half-open":
            host.set_loss(_ALMOST_ALL)
        if blow.kind == "agent killed":
            launch.signal(host.index, signal.SIGKILL, only_agent=True)
        while blow.kind == "switched off" and launch.pids(
            host.index
        ):  # an agent may just have started a rank
            launch.signal(host.index, signal.SIGKILL)
            time.sleep(_POLL_S)
        if blow.kind in ("agent stopped", "host stopped"):
            launch.signal(host.index, signal.SIGSTOP, only_agent=blow.kind == "agent stopped")
        comes_back = self._returns and blow.kind in ("agent killed", "switched off")
        lasts_s = 0.0 if comes_back else blow.lasts_s
        if lasts_s is not None:
            self._ends.append((time.monotonic() + lasts_s, blow))

    def _end_what_is_due(self) -> bool:
        due = [each for each in self._ends if each[0] <= time.monotonic()]
        for each in due:
            if self._ends_now(each[1]):
                self._ends.remove(each)
        return False

    def _ends_now(self, blow: Blow) -> bool:
        """End a fault, and return whether that was possible."""
        launch, host = self._launch, self._hosts[blow.host]
        is_dead = blow.kind in ("agent killed", "switched off")
        if is_dead and (launch.pids(host.index) or launch.processes[host.index].poll() is None):
            return False
        if blow.kind in ("agent stopped", "host stopped"):
            launch.signal(host.index, signal.SIGCONT)
        if blow.kind == "half-open":
            host.set_loss("0%")
        host.set_link(up=True)
        if is_dead:
            launch.processes[host.index] = launch.start(host)
        return True
