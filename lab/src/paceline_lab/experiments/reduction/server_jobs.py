"""Workers and parameter servers as processes on the hosts of an emulated cluster, and how busy this machine was.

Servers are `python -m paceline_servers`, as `paceline serve` is. They have the last hosts.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.comm import TOKEN
from paceline.errors import ConfigurationError

if TYPE_CHECKING:
    from paceline_lab.emulation import ClusterSpec


_TOLD = "PACELINE_BENCHMARK_WORKER"  # what a worker is told, in its environment


def run_workers(
    spec: ClusterSpec, num_workers: int, module: str, told: Mapping[str, Any], patience_s: float
) -> tuple[Any, float]:
    """Run a worker on each of the first hosts, a server on each other; return rank 0's output and the load.

    Args:
        spec: The cluster.
        num_workers: Hosts with a worker.
        module: Module whose function `worker` runs on a worker; it calls `told_to_worker` for its settings.
        told: Settings of every worker, which also get the servers' addresses.
        patience_s: Timeout of the workers.

    Raises:
        ConfigurationError: A worker failed; its own output is above.
    """
    from paceline_lab.emulation import EmulatedCluster

    environment = {**os.environ, TOKEN: secrets.token_hex(16), "OMP_NUM_THREADS": "1"}
    processes: list[subprocess.Popen[str]] = []
    with EmulatedCluster(spec) as cluster:
        try:
            addresses = []
            for host in cluster.hosts[num_workers:]:
                command = [sys.executable, "-m", "paceline_servers", "--address", host.address]
                processes.append(_start(host.command([*command, "--until-closed"]), environment))
                assert processes[-1].stdout is not None
                addresses.append(processes[-1].stdout.readline().strip())
            workers = []
            for rank, host in enumerate(cluster.hosts[:num_workers]):
                own = environment | {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(num_workers),
                    "LOCAL_WORLD_SIZE": "1",  # as torchrun says, so that defaults are those of several hosts
                    "MASTER_ADDR": cluster.hosts[0].address,
                    "MASTER_PORT": "29500",
                    "GLOO_SOCKET_IFNAME": host.interface,
                    _TOLD: json.dumps({**told, "addresses": addresses}),
                }
                command = [sys.executable, "-c", f"from {module} import worker; worker()"]
                workers.append(_start(host.command(command), own))
            processes += workers
            busy = _Busy()
            printed = workers[0].communicate(timeout=patience_s)[0]
            ratio = busy.ratio()
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if workers[0].returncode:
        raise ConfigurationError(f"a worker ended with code {workers[0].returncode}: see above.")
    return json.loads(printed.splitlines()[-1]), ratio


def told_to_worker() -> dict[str, Any]:
    """Return the job's settings for this worker, with the servers' `addresses`."""
    told: dict[str, Any] = json.loads(os.environ[_TOLD])
    return told


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=dict(environment),
    )


class _Busy(threading.Thread):
    """A thread that measures the load of this machine's cores, in the second half of a time."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._samples = [_ticks()]
        self._is_over = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._is_over.wait(0.5):
            self._samples.append(_ticks())

    def ratio(self) -> float:
        self._is_over.set()
        self.join()
        (total, idle), (last_total, last_idle) = self._samples[len(self._samples) // 2], self._samples[-1]
        return 1 - (last_idle - idle) / max(last_total - total, 1)


def _ticks() -> tuple[int, int]:
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(fields), fields[3] + fields[4]
