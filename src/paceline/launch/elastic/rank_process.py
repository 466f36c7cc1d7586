"""One process of a rank, as its agent has it: started in a session of its own, with a connection to the agent."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence

from paceline.elastic.agent_connection import FD, AgentConnection, Message
from paceline.errors import ProtocolError
from paceline.host.processes import Vitals, VitalSigns
from paceline.launch.elastic.output import Output


class RankProcess:
    """A rank's process with this environment. `line` is its agent connection; `pidfd` is readable once it has ended."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], output: Output) -> None:
        self.line, theirs = AgentConnection.pair()
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
        self.pidfd = os.pidfd_open(self.pid)
        self._signs = VitalSigns(self.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def vitals(self) -> Vitals:
        return self._signs.look()

    def tell(self, message: Message, handing: socket.socket | None = None) -> None:
        self.line.tell(message, waits=False, handing=handing)

    def hear(self) -> Message | None:
        """Return a message that has come; None if the process has closed its end or sent something else."""
        with contextlib.suppress(ProtocolError):
            return self.line.hear()
        return None

    def ask_to_end(self, number: signal.Signals) -> None:
        """Send a signal to the process and to its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def bury(self) -> int:
        """Kill the process and its session, and return its exit code. Blocks until the kernel has freed its memory."""
        if not self.has_ended():
            self._process.kill()
        code = self._process.wait()
        self.ask_to_end(signal.SIGKILL)  # the session outlives its leader
        self._output.has_ended.set()
        self.line.close()
        os.close(self.pidfd)
        self._signs.close()
        return code


def how_it_ended(code: int) -> str:
    """Return an exit code in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
