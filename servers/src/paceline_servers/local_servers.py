"""The parameter servers that a launcher starts next to its ranks, and the values of `--servers`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from typing_extensions import Self

from paceline.comm import TOKEN
from paceline.errors import ConfigurationError
from paceline.host.addresses import LOOPBACK, is_loopback
from paceline_servers import SERVERS

_PATIENCE_S = 5.0
_MOST = 1024


def parse_servers(text: str) -> tuple[int, tuple[str, ...]]:
    """Return how many servers to start, and addresses of running ones. Raises ConfigurationError for other texts."""
    if text.lstrip("-").isdigit():
        if not 0 < int(text) <= _MOST:
            raise ConfigurationError(
                f"--servers {text} starts no parameter server: pass 1 to {_MOST}, or leave it out."
            )
        return int(text), ()
    addresses = tuple(text.split(","))
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) <= 65535:
            raise ConfigurationError(
                f"--servers {text}: {address!r} is not an address. Say how many to start here, --servers 2, or name "
                "those that run: --servers 10.0.0.5:7000,10.0.0.6:7000"
            )
    return 0, addresses


class ServersOption:
    """The option `--servers` of `paceline run`."""

    metavar = "N or HOST:PORT,..."
    words = "Parameter servers (reduction=ParameterServers()): how many to start here, or where they run."
    why_not_elastic = "a step on servers cannot be computed again"

    def parse(self, text: str) -> AskedServers:
        """Return the servers that the option's value asks for. Raises the ConfigurationError of `parse_servers`."""
        return AskedServers(*parse_servers(text))


@dataclass(frozen=True)
class AskedServers:
    """The servers that a launch was asked for."""

    number: int  # how many to start on this machine
    addresses: tuple[str, ...]  # of servers that run already

    def running(self, address: str | None, note: Callable[[str], None]) -> LocalServers:
        """Return a context manager that runs them, on this address of the machine."""
        return LocalServers(self.number, self.addresses, address, note)


class LocalServers:
    """The servers of this launch, started here or running already. A context manager; it ends those that it started."""

    def __init__(
        self, number: int, addresses: tuple[str, ...], address: str | None, note: Callable[[str], None]
    ) -> None:
        self._number = number
        self._addresses = list(addresses)
        self._address = address or LOOPBACK
        self._note = note
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        if self._number and not is_loopback(self._address) and not os.environ.get(TOKEN):
            self._note(
                f"the parameter servers on {self._address} take any client for a rank; give all launchers the "
                f"same {TOKEN}, a secret such as `openssl rand -hex 16` makes."
            )
        command = [sys.executable, "-m", "paceline_servers", "--until-closed", "--address", self._address]
        try:
            for _ in range(self._number):
                self._processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        text=True,
                        start_new_session=True,  # so Ctrl-C in the terminal does not reach it before the ranks
                    )
                )
            for process in self._processes:
                self._addresses.append(_read_address(process.stdout))
        except BaseException:
            self._end()
            raise
        if self._addresses:
            os.environ[SERVERS] = ",".join(self._addresses)
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def who_died(self) -> str | None:
        """Return a description of the servers that ended before their launcher, or None."""
        first = len(self._addresses) - len(self._processes)
        dead = [
            f"parameter server {first + i} (process {process.pid}) "
            + (f"was killed by signal {-code}" if code < 0 else f"exited with code {code}")
            for i, process in enumerate(self._processes)
            if (code := process.poll()) is not None
        ]
        return "; ".join(dead) or None

    def _end(self) -> None:
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _read_address(stream: IO[str] | None) -> str:
    line = "" if stream is None else stream.readline().strip()
    if not line:
        raise ConfigurationError("a parameter server did not start: see its own message above.")
    return line
