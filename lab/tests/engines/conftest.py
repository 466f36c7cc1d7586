"""What the engines' tests share: a folder of a training, and hosts that are network namespaces."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from harness.engine_jobs import TrainingFolder, wait_until
from harness.terminal import environment
from paceline_lab.emulation import ClusterSpec, EmulatedCluster, EmulatedHost
from paceline_lab.errors import UnsupportedError

_MARK = "PACELINE_ENGINE_TEST"


class Host:
    """A host whose engine a test plays. It can lose its power, and come back at another address."""

    def __init__(self, inside: EmulatedHost, folder: Path) -> None:
        self.inside, self._folder = inside, folder
        self.name, self.address = inside.name, inside.address
        self._mark = uuid.uuid4().hex
        self._started: list[subprocess.Popen[bytes]] = []

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables of what is started here."""
        return environment(self._folder, cold=True) | {_MARK: self._mark, "ENGINE_HOST": self.name}

    def run(self, *command: str) -> None:
        """Run a command to its end."""
        subprocess.run(self.inside.command(command), check=True, capture_output=True)

    def start(self, command: Sequence[str], **setting: str) -> subprocess.Popen[bytes]:
        """Start a command. Its output goes to a file of the folder."""
        env = self.environment | setting
        with (self._folder / f"out-{self.name}").open("ab") as out:
            started = subprocess.Popen(
                self.inside.command(command),
                cwd=self._folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(started)
        return started

    def processes(self) -> dict[int, str]:
        """Return the command lines of what lives on this host."""
        found = {}
        needle = f"{_MARK}={self._mark}".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if "namespaces.py" not in words and words:
                        found[int(entry.name)] = words
        return found

    def lose_power(self) -> None:
        """Kill all processes of this host at once; its network goes first."""
        self.inside.set_link(up=False)
        self.kill_all()

    def kill_all(self) -> None:
        while found := self.processes():
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for each in self._started:
            each.wait()

    def move_to(self, address: str) -> None:
        """Take another address, as a new machine does in the place of a lost one."""
        interface = self.inside.interface
        self.run("ip", "address", "flush", "dev", interface)
        self.run("ip", "address", "add", f"{address}/24", "dev", interface)
        names = self.inside.hosts_file  # torchrun meets at the host's own name
        names.write_text(
            re.sub(rf"^{re.escape(self.address)}\b", address, names.read_text(), flags=re.MULTILINE)
        )
        self.inside.set_link(up=True)
        self.address = address

    def wait_until_empty(self) -> None:
        """Wait until no process is left."""
        wait_until(lambda: not self.processes(), lambda: f"{self.name} still has {self.processes()}")


@pytest.fixture
def training(tmp_path: Path) -> TrainingFolder:
    return TrainingFolder(tmp_path)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    """Four hosts with a network between them, which has no way out."""
    with contextlib.ExitStack() as stack:
        try:
            cluster = stack.enter_context(EmulatedCluster(ClusterSpec(hosts=4)))
        except UnsupportedError as error:
            pytest.skip(str(error))
        made = [Host(each, tmp_path) for each in cluster.hosts]
        try:
            yield made
        finally:
            for each in made:
                each.kill_all()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the parameters of a training of one rank that is not disturbed."""
    folder = TrainingFolder(tmp_path_factory.mktemp("undisturbed"))
    folder.let_it_end()
    env = environment(folder.path, cold=True) | {"PACELINE_PEERS": "local", "PACELINE_JOB": "undisturbed"}
    subprocess.run(
        [sys.executable, *folder.command], env=env, check=True, timeout=900, start_new_session=True
    )
    return folder.parameters()
