"""Runs a script on every host of a cluster: one agent a host, and every line of output with host and rank.

Rules
1. Each host's agent is `paceline run` with `--nnodes`, `--node-rank` and the first host's address, so the ranks'
   environment is what torchrun gives on real hosts.
2. When a host fails, the others get a grace period to fail by themselves, since a rank's own message often names the
   cause. Then they are stopped.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from paceline.errors import ConfigurationError

if TYPE_CHECKING:
    from paceline_lab.emulation.cluster import Counters, EmulatedCluster
    from paceline_lab.emulation.cluster_spec import ClusterSpec

OnLine = Callable[[int, "int | None", str], None]

PORT = 29500  # free: every host has its own ports
GRACE_S = 10.0
TIMED_OUT = 124
_STOP_S = 5.0
_POLL_S = 0.02
_SAMPLE_S = 0.5
_CROWDED = 0.95
_PREFIX = "\x1f"
_OF_RANK = re.compile(f"{_PREFIX}(\\d+){_PREFIX}(.*)", re.DOTALL)


@dataclass(frozen=True)
class Outcome:
    """The end of a job on a cluster.

    Attributes:
        exit_code: 0 if every host's agent ended well, 124 after a timeout, otherwise the code of the host that failed
            first.
        exit_codes: Exit code of each host; None for one that had to be stopped.
        failed_host: The host that failed first; None if none did.
        failed_s: Seconds from the start until it failed.
        wall_s: Seconds from the start of the agents to the end of the last.
        timed_out: Whether `timeout_s` ended it.
        busy_ratio: Share of this machine's processor time that all programs used in the second half.
        counters: Traffic of each host's links during the job.
        spec: The cluster.
    """

    exit_code: int
    exit_codes: tuple[int | None, ...]
    failed_host: int | None
    failed_s: float | None
    wall_s: float
    timed_out: bool
    busy_ratio: float
    counters: tuple[Counters, ...]
    spec: ClusterSpec

    def failure(self) -> str | None:
        """Return what went wrong, in one paragraph; None if all is well."""
        if self.timed_out:
            return (
                f"the time was up after {self.wall_s:.1f} s and every rank was stopped. Give the job longer with "
                "--timeout, or see above what it was doing."
            )
        if self.failed_host is None or self.failed_s is None:
            return None
        others = [
            f"host{host} {'had to be stopped' if code is None else f'exit code {code}'}"
            for host, code in enumerate(self.exit_codes)
            if code != 0 and host != self.failed_host
        ]
        also = f"; then {', '.join(others)}" if others else "; the others ended well"
        return (
            f"host{self.failed_host} failed first (exit code {self.exit_codes[self.failed_host]}), "
            f"{self.failed_s:.1f} s after the start{also}. The ranks' own messages are above. "
            "`paceline explain failed first` says more."
        )

    def remarks(self) -> list[str]:
        """Return what may have shaped the figures besides the spec."""
        found = []
        if self.busy_ratio > _CROWDED:
            found.append(
                f"This machine's cores were {self.busy_ratio:.0%} busy: they, not the links, may have set the pace. "
                "Fewer hosts, a lower --rate, a larger --mtu or --offload need less."
            )
        lost = sum(counted.wire_drops for counted in self.counters)
        if lost:
            found.append(
                f"The emulation itself lost {lost} packets: this machine is too slow for that --delay at that --rate "
                "without netem. Lower the rate, or pass --offload."
            )
        lost = sum(counted.lost_packets for counted in self.counters)
        options = [] if self.spec.congestion_control == "bbr" else ["--congestion-control bbr"]
        options += ["--min-rto 5ms"] if self.spec.min_rto_s is None else []
        if lost and options:
            found.append(
                f"{lost} packets were lost on the way, and TCP's defaults make connections wait for each: "
                f"{' and '.join(options)} would set what tuned hosts have."
            )
        return found

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON; sizes in bytes, times in seconds."""
        return asdict(self) | {"remarks": self.remarks(), "failure": self.failure()}


class Job:
    """The agents of a running job.

    Args:
        cluster: Cluster on which it runs.
        argv: A script and its arguments, or `-m`, a module and its own.
        on_line: Gets every line of output.
        environment: Added to the ranks'.
    """

    def __init__(
        self, cluster: EmulatedCluster, argv: Sequence[str], on_line: OnLine, environment: Mapping[str, str]
    ) -> None:
        check_script(argv)
        self._spec = cluster.spec
        self._on_line = on_line
        self._printing = threading.Lock()
        self._folder = cluster.folder
        self._logs = Path(tempfile.mkdtemp(prefix="logs-", dir=cluster.folder))
        self._readers: list[threading.Thread] = []
        self._agents: list[subprocess.Popen[str]] = []
        self._started_s = time.monotonic()
        self._processor = _Processor()
        for host in cluster.hosts:
            self._agents.append(
                subprocess.Popen(
                    host.command(self._agent(host.index, cluster.hosts[0].address, argv)),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    start_new_session=True,  # Ctrl-C in the terminal is passed on by us, once
                    env=self._environment(host.interface, environment),
                )
            )
            self._follow(host.index, self._agents[-1])

    def wait(self, timeout_s: float | None) -> Outcome:
        """Wait until every agent has ended, or had to be stopped; the counters are not read yet."""
        failed: int | None = None
        failed_s = stopped_s = math.inf
        stopped: list[int] = []
        while running := [host for host, agent in enumerate(self._agents) if agent.poll() is None]:
            now_s = time.monotonic() - self._started_s
            self._processor.sample(now_s)
            if failed is None and (failed := self._first_failed()) is not None:
                failed_s = now_s
            if now_s > min(failed_s + GRACE_S, math.inf if timeout_s is None else timeout_s):
                stopped, stopped_s = running, now_s
                self._stop([self._agents[host] for host in running])
                break
            time.sleep(_POLL_S)
        wall_s = time.monotonic() - self._started_s
        for reader in self._readers:
            reader.join()
        if failed is None and not stopped:
            failed, failed_s = self._first_failed(), wall_s
        exit_codes = tuple(
            None if host in stopped else agent.returncode for host, agent in enumerate(self._agents)
        )
        timed_out = bool(stopped) and failed_s + GRACE_S > stopped_s
        code = 0 if failed is None else exit_codes[failed] or 1
        return Outcome(
            exit_code=TIMED_OUT if timed_out else code,
            exit_codes=exit_codes,
            failed_host=failed,
            failed_s=None if failed is None else failed_s,
            wall_s=wall_s,
            timed_out=timed_out,
            busy_ratio=self._processor.busy_ratio(),
            counters=(),
            spec=self._spec,
        )

    def close(self) -> None:
        """End the processes that still run, and remove the job's files."""
        self._stop([agent for agent in self._agents if agent.poll() is None])
        for reader in self._readers:
            reader.join()
        shutil.rmtree(self._logs, ignore_errors=True)

    def _first_failed(self) -> int | None:
        return next((i for i, agent in enumerate(self._agents) if agent.poll() not in (None, 0)), None)

    def _stop(self, agents: Sequence[subprocess.Popen[str]]) -> None:
        """SIGTERM, so that an agent ends its ranks; then SIGKILL, after which its keeper does."""
        for agent in agents:
            agent.terminate()
        deadline_s = time.monotonic() + _STOP_S
        for agent in agents:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(max(0.0, deadline_s - time.monotonic()))
        for agent in agents:
            if agent.poll() is None:
                agent.kill()
                agent.wait()

    def _agent(self, host: int, first_address: str, argv: Sequence[str]) -> list[str]:
        spec = self._spec
        flags = {
            "--nnodes": spec.hosts,
            "--node-rank": host,
            "--nproc-per-node": spec.ranks_per_host[host],
            "--master-addr": first_address,
            "--master-port": PORT,
            "--tee": 3,
            "--log-dir": self._logs / f"host{host}",
        }
        options = [text for flag, value in flags.items() for text in (flag, str(value))]
        return [sys.executable, "-m", "paceline", "run", *options, *argv]

    def _environment(self, interface: str, added: Mapping[str, str]) -> dict[str, str]:
        ours = {
            "GLOO_SOCKET_IFNAME": interface,
            "NCCL_SOCKET_IFNAME": interface,
            "TP_SOCKET_IFNAME": interface,
            "OMP_NUM_THREADS": "1",
            "PACELINE_LAUNCH_FOLDERS": str(self._folder),  # watchdogs die with their host
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": f"{_PREFIX}${{rank}}{_PREFIX}",
        }
        return {**os.environ, **ours, **added}

    def _follow(self, host: int, agent: subprocess.Popen[str]) -> None:
        for stream in (agent.stdout, agent.stderr):
            if stream is not None:
                reader = threading.Thread(target=self._read, args=(host, stream), daemon=True)
                reader.start()
                self._readers.append(reader)

    def _read(self, host: int, stream: TextIO) -> None:
        with stream:
            for line in stream:
                found = _OF_RANK.match(line)
                rank = None if found is None else int(found[1])
                text = line if found is None else found[2]
                with self._printing:
                    self._on_line(host, rank, text.rstrip("\n"))


class _Processor:
    """The load of this machine's cores in the second half of a time. The first half is mostly starting Python."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, int, int]] = []

    def sample(self, now_s: float) -> None:
        """Note the ticks so far, twice a second."""
        if self._samples and now_s - self._samples[-1][0] < _SAMPLE_S:
            return
        with Path("/proc/stat").open() as stat:
            ticks = [int(field) for field in stat.readline().split()[1:9]]
        self._samples.append((now_s, sum(ticks), ticks[3] + ticks[4]))

    def busy_ratio(self) -> float:
        """Return the mean of the samples' second half; 0 if there are too few."""
        if len(self._samples) < 3:
            return 0.0
        _, total, idle = self._samples[len(self._samples) // 2]
        _, last_total, last_idle = self._samples[-1]
        return 1 - (last_idle - idle) / max(last_total - total, 1)


def check_script(argv: Sequence[str]) -> None:
    """Refuse a script that does not exist, before anything is made.

    Raises:
        ConfigurationError: Names what was looked for and where.
    """
    if not argv or list(argv) == ["-m"]:
        raise ConfigurationError(
            "no script to run. Name it after the options: paceline emulate --hosts 2 -- train.py --epochs 3"
        )
    if argv[0] == "-m":
        top = "" if "" in argv[1].split(".") else argv[1].partition(".")[0]
        path = [str(Path.cwd()), *sys.path]
        if importlib.machinery.PathFinder.find_spec(top or "?", path) is None:
            raise ConfigurationError(
                f"there is no module {argv[1]}: neither {Path.cwd()} nor this Python's packages have a {top}."
            )
    elif not Path(argv[0]).is_file():
        raise ConfigurationError(
            f"there is no script {argv[0]} (looked in {Path(argv[0]).parent.resolve()}). Check the path, or pass -m "
            "to run a module by its dotted name."
        )
