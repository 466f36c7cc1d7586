"""The addresses at which agents of a job may listen, by `PACELINE_PEERS`. The source is asked once a second.

    10.0.0.1:29400,host-b       a list of addresses or names
    dns:NAME[:PORT]             all addresses of a name, such as a headless service's
    file:FOLDER                 a shared folder, in which each agent writes where it listens
    slurm                       the nodes of this Slurm job, or of all tasks of its array

An address is only a place to say something to. Agents prove there that they know the job's token.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.errors import ConfigurationError
from paceline.host.addresses import (
    ELSEWHERE,
    LOOPBACK,
    addresses_of,
    interfaces,
    is_loopback,
    own_address_towards,
)

Address = tuple[str, int]
_PORT = 29400
_STALE_S = 60.0  # that a file of an agent may be untouched
_COMMAND_S = 10.0


class Discovery:
    """The source of addresses that `words` name. `listen` is where the agent of this host is to listen.

    Raises ConfigurationError if the words name no source.
    """

    def __init__(self, words: str, own_address: str = "", port: int = 0) -> None:
        self.words = words
        kind, _, rest = words.partition(":")
        if kind in ("dns", "file") and not rest.partition(":")[0]:
            raise ConfigurationError(
                f"PACELINE_PEERS (or --peers) {words} has no name behind the colon. Give dns:NAME, whose addresses are "
                "the hosts, or file:FOLDER, a folder that all hosts share."
            )
        self._port = port or _PORT
        self._own = own_address
        self._folder: Path | None = None
        self._file: Path | None = None
        if kind == "dns":
            name, _, given = rest.partition(":")
            self._port = _port_of(words, given) if given else self._port
            self._find: Callable[[], Sequence[Address]] = lambda: self._at(name)
        elif kind == "file":
            self._folder, self._port, self._find = Path(rest), port, self._in_folder
            if not self._folder.is_dir():
                raise ConfigurationError(
                    f"PACELINE_PEERS (or --peers) {words}: there is no folder {rest}. Make it where all hosts see it."
                )
        elif words == "slurm":
            if "SLURM_JOB_ID" not in os.environ:
                raise ConfigurationError(
                    "PACELINE_PEERS (or --peers) is slurm, but this is no Slurm job: SLURM_JOB_ID is not set."
                )
            self._find = self._in_slurm
        else:
            listed = [_listed(each, self._port) for each in words.split(",")]
            self._find = lambda: [each for name, at in listed for each in self._at(name, at)]

    def find(self) -> Sequence[Address]:
        """Return where agents may listen. Blocks. Raises OSError if nothing is known now."""
        return self._find()

    def listen(self) -> Address:
        """Return where this host's agent is to listen; port 0: anywhere. Blocks. Raises OSError if it is not known."""
        if self._own:
            return self._own, self._port
        if self._folder is not None:
            # A network of its own may have no way to elsewhere.
            own = own_address_towards(ELSEWHERE) or next(iter(interfaces().values()), LOOPBACK)
            return own, self._port
        found = self.find()
        for host, port in found:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with contextlib.suppress(OSError), socket.socket(family) as probe:
                probe.bind((host, 0))
                return host, port
        for host, _ in found:
            own = own_address_towards(host)
            if own and not is_loopback(own):
                return own, self._port
        raise OSError(0, f"{self.words} names no address that this host reaches")

    def tell(self, host: str, port: int) -> None:
        """Write the address of this host's agent into the source, if that is a folder. Called once a second."""
        if self._folder is not None:
            self._file = self._folder / f"{host}_{port}.agent"
            self._file.touch()

    def forget(self) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _at(self, name: str, port: int = 0) -> list[Address]:
        return [(each, port or self._port) for each in addresses_of(name)]

    def _in_folder(self) -> list[Address]:
        assert self._folder is not None
        found = []
        for file in self._folder.glob("*.agent"):
            with contextlib.suppress(OSError, ValueError):
                if time.time() - file.stat().st_mtime < _STALE_S:
                    host, _, port = file.stem.rpartition("_")
                    found.append((host, int(port)))
        return found

    def _in_slurm(self) -> list[Address]:
        job = os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ["SLURM_JOB_ID"]
        lists = _said(["squeue", "--noheader", "--states=RUNNING", f"--jobs={job}", "--format=%N"]).split()
        names = _said(["scontrol", "show", "hostnames", ",".join(lists)]).split() if lists else []
        found: list[Address] = []
        for name in names:
            with contextlib.suppress(OSError):
                found += self._at(name)
        return found


def _said(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=True).stdout
    except subprocess.SubprocessError as error:
        raise OSError(0, f"{command[0]} failed: {error}") from error


def _listed(word: str, port: int) -> tuple[str, int]:
    if not word.strip() or "/" in word:
        raise ConfigurationError(
            f"PACELINE_PEERS (or --peers) names {word!r}, which is no address of a host. Give HOST or HOST:PORT, "
            "several with commas between them; or local, dns:NAME, file:FOLDER or slurm."
        )
    host, has_port, given = word.strip().rpartition(":")
    if not has_port or (":" in host and not host.endswith("]")):  # without a port; or an IPv6 address
        host, given = word.strip(), ""
    return host.strip("[]"), _port_of(word, given) if given else port


def _port_of(word: str, given: str) -> int:
    if not given.isdecimal() or not 0 < int(given) < 1 << 16:
        raise ConfigurationError(f"PACELINE_PEERS (or --peers) names {word!r}, and {given!r} is no port.")
    return int(given)
