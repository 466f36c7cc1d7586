"""One process of a rank, as its agent has it: one that the agent has started, or one that an engine has.

The agent has started a `RankProcess`, in a session of its own, and ends it with all that it has started. An engine has
started a `WatchedProcess`, so signals go to that process alone, and only its engine starts another one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from paceline.elastic.agent_connection import FD, AgentConnection, Finished, Message
from paceline.elastic.guest import PeerProcess
from paceline.errors import ProtocolError
from paceline.host.processes import GONE, Vitals, VitalSigns
from paceline.launch.elastic.output import Output


class AgentsRank(ABC):
    """A process of a rank. `connection` is its agent connection."""

    connection: AgentConnection
    pid: int

    def tell(self, message: Message, handing: socket.socket | None = None) -> bool:
        return self.connection.tell(message, waits=False, handing=handing)

    def hear(self) -> Message | None:
        """Return a message that has come; None if the process has closed its end or sent something else."""
        with contextlib.suppress(ProtocolError):
            return self.connection.hear()
        return None

    @abstractmethod
    def vitals(self) -> Vitals:
        """Return the process's state, by the kernel."""

    @abstractmethod
    def ask_to_end(self, number: signal.Signals) -> None:
        """Send a signal, also to what the process has started if the agent has started the process."""

    @abstractmethod
    def has_ended(self) -> bool:
        """Return whether it has ended."""

    @abstractmethod
    def bury(self) -> int | None:
        """Kill the process, and return its exit code; None if no source says it. Blocks until its memory is free."""


class RankProcess(AgentsRank):
    """A rank's process with this environment."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], output: Output) -> None:
        self.connection, theirs = AgentConnection.pair()
        self._output = output
        with theirs, output.opened() as (stdout, stderr):
            self._process = subprocess.Popen(
                command,
                env={**environment, FD: str(theirs.fileno())},
                stdout=stdout,
                stderr=stderr,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # so that what it has started can be ended with it
            )
        self.pid = self._process.pid
        self._signs = VitalSigns(self.pid)

    def vitals(self) -> Vitals:
        return self._signs.look()

    def ask_to_end(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def bury(self) -> int:
        if not self.has_ended():
            self._process.kill()
        code = self._process.wait()
        self.ask_to_end(signal.SIGKILL)  # the session outlives its leader
        self._output.has_ended.set()
        self.connection.close()
        self._signs.close()
        return code


class WatchedProcess(AgentsRank):
    """A rank's process that has connected itself, by the Unix socket `end`."""

    def __init__(self, end: socket.socket) -> None:
        self.connection, self._process = AgentConnection(end), PeerProcess(end)
        self.pid = self._process.pid
        self._has_finished = False  # it says that it ends well, and waits for the end of the agent

    def hear(self) -> Message | None:
        message = super().hear()
        self._has_finished |= isinstance(message, Finished)
        return message

    def vitals(self) -> Vitals:
        return Vitals(GONE, is_ending=True, cpu_ticks=0) if self._has_finished else self._process.vitals()

    def ask_to_end(self, number: signal.Signals) -> None:
        self._process.send(number)

    def has_ended(self) -> bool:
        return self._has_finished or self._process.has_ended()

    def bury(self) -> int | None:
        if self._has_finished:
            return 0
        self.ask_to_end(signal.SIGKILL)
        code = self._process.wait(30.0)  # the kernel frees its memory
        self.close()
        return code

    def close(self) -> None:
        """Close the connection, and let the process go on."""
        self.connection.close()
        self._process.close()


def how_it_ended(code: int | None) -> str:
    """Return an exit code in words."""
    if code is None:
        return "ended"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
