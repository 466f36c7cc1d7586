"""What stands in for ssh between the hosts of an emulated cluster, for launchers that want one (mpirun).

A host cannot start a process on another one. So the agent, a small program that the launcher calls as `AGENT HOST
COMMAND...`, hands its words over a Unix socket in a private folder to us, outside; we start them inside the host.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.lab.emulation import EmulatedCluster

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
        cluster: Its hosts are called by their addresses.
        folder: Private; for the agent and the socket.
        environment: Of what is started.
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
        shell = host.command(
            ["sh", "-c", " ".join(command)]
        )  # as ssh: the remote shell takes the words apart
        done = subprocess.run(shell, env=dict(environment), stdout=sys.stderr, check=False)
        words.write(f"{done.returncode}\n")
