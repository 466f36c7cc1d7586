"""Shadows: processes that follow the ranks of this host, and are no members. How they find the job and its ranks.

Rules
1. The agent listens at an abstract Unix socket, whose name has the user, a digest of the script with its arguments, and
   the agent's pid. `paceline shadow` finds it in /proc/net/unix. The kernel removes the name with the agent.
2. Both ends ask the kernel for the other's user. A process of another user is not heard.
3. In each membership every rank of this host gets an end of a connection to each shadow, and sends its share. The agent
   hands the ends over, and never waits for a shadow.
4. With `--shadow FOLDER` the agent starts a `paceline shadow`, when training has begun.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.elastic.agent_connection import (
    RESUME,
    AgentConnection,
    Following,
    Give,
    Ready,
    Receive,
    Refused,
    difference,
)
from paceline.elastic.guest import credentials_of_peer
from paceline.errors import ProtocolError
from paceline.launch.command_line import LaunchArguments
from paceline.launch.elastic.plan import NOT_STARTED
from paceline.launch.elastic.rank_assignments import Rank

if TYPE_CHECKING:
    from typing_extensions import Self

PREFIX = "paceline-job"
"""First word of the names at which agents listen."""
_MOST_WAITING = 8
_FINISH_S = 300.0  # that a shadow may take to write what it holds


def name_of(arguments: LaunchArguments) -> str:
    """Return the beginning of the name at which the agent of this script's job listens."""
    script = Path(arguments.script)
    words = [str(script.resolve() if script.exists() else script), *arguments.torchrun.training_script_args]
    digest = hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]
    return f"{PREFIX}/{os.getuid()}/{digest}"


@dataclass
class _Shadow:
    """One shadow's connection."""

    line: AgentConnection
    card: str | None = None  # what it has in common with the ranks; None: it has not said so
    epoch: int = NOT_STARTED  # of the membership that it follows


class Shadows:
    """The shadows of this host's ranks. A context manager around the launch."""

    def __init__(self, arguments: LaunchArguments) -> None:
        self._arguments = arguments
        if arguments.shadow:
            os.environ[RESUME] = arguments.shadow
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{name_of(arguments)}/{os.getpid()}.{secrets.token_hex(4)}")
        self._listener.listen(_MOST_WAITING)
        self._listener.setblocking(False)
        self._shadows: list[_Shadow] = []
        self._started: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The ranks have ended. Waits for the shadow that was started here, which writes what it holds."""
        self._listener.close()
        for shadow in self._shadows:
            shadow.line.close()
        if self._started is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._started.wait(_FINISH_S)

    def look(self, training: Sequence[Rank], epoch: int, card: str | None) -> None:
        """Hear new shadows, and let those that are ready follow these ranks. Local; never blocks."""
        if epoch != NOT_STARTED and self._started is None and self._arguments.shadow:
            self._start(self._arguments.shadow)
        with contextlib.suppress(BlockingIOError):
            while True:
                end, _ = self._listener.accept()
                end.setblocking(True)
                if credentials_of_peer(end)[1] == os.getuid():
                    self._shadows.append(_Shadow(AgentConnection(end)))
                else:
                    end.close()
        for shadow in list(self._shadows):
            while select.select([shadow.line], [], [], 0)[0] and self._hear(shadow):
                pass
            if shadow in self._shadows and epoch != NOT_STARTED:
                self._serve(shadow, training, epoch, card)

    def _start(self, folder: str) -> None:
        """Start the shadow that the launch was asked for."""
        flags = ["-m"] if self._arguments.torchrun.module else []
        words = [*flags, self._arguments.script, *self._arguments.torchrun.training_script_args]
        command = [sys.executable, "-m", "paceline", "shadow", folder, "--", *words]
        self._started = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def _hear(self, shadow: _Shadow) -> bool:
        """Take in one message. Return False if the shadow has left."""
        message = None
        with contextlib.suppress(ProtocolError):
            message = shadow.line.hear()
        if isinstance(message, Ready):
            shadow.card, shadow.epoch = message.card, NOT_STARTED
        elif message is None:
            self._shadows.remove(shadow)
            shadow.line.close()
            return False
        return True

    def _serve(self, shadow: _Shadow, training: Sequence[Rank], epoch: int, card: str | None) -> None:
        if shadow.epoch == epoch:
            return
        if shadow.card is None:  # it asks whether the job has begun
            shadow.epoch = epoch
            shadow.line.tell(Following(epoch), waits=False)
            return
        if card is not None and (why := difference(card, shadow.card)) is not None:
            words = f"the shadow runs another script or model: {why}. Start it as the ranks were started."
            shadow.line.tell(Refused(words), waits=False)
        else:
            for share, rank in enumerate(training):
                ends = socket.socketpair()
                with ends[0], ends[1]:
                    shadow.line.tell(Receive(share, len(training)), waits=False, handing=ends[0])
                    rank.process.tell(Give(epoch, share, len(training)), handing=ends[1])
        shadow.epoch = epoch
