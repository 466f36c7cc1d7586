"""Shadows: processes that follow the ranks of this host, and are no members. How they find the job and its ranks.

Rules
1. The agent listens at an abstract Unix socket, whose name has the user, a digest of the script with its arguments, and
   the agent's pid. `paceline shadow` finds it in /proc/net/unix. The kernel removes the name with the agent.
2. Both ends ask the kernel for the other's user. A process of another user is not heard.
3. In each membership every rank of this host gets an end of a connection to each shadow, and sends its share. The agent
   hands the ends over, and never waits for a shadow.
4. With `--shadow FOLDER`, or if the script asks for it, the agent of rank 0 starts a `paceline shadow`, when training
   has begun. This one is a spare: it takes the place of a lost rank, and the agent starts another one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.elastic.agent_connection import (
    LOST_AFTER,
    RESUME,
    CaughtUp,
    Following,
    Give,
    Ready,
    Receive,
    Refused,
    StillReplaying,
    difference,
)
from paceline.elastic.guest import credentials_of_peer
from paceline.host.processes import is_stopped
from paceline.launch.command_line import LaunchArguments
from paceline.launch.elastic.local_ranks import Rank
from paceline.launch.elastic.plan import NOT_STARTED
from paceline.launch.elastic.rank_process import WatchedProcess

if TYPE_CHECKING:
    from typing_extensions import Self

_MOST_WAITING = 8
_FINISH_S = 300.0  # that a shadow may take to write what it holds


@dataclass
class _Shadow:
    """One shadow."""

    process: WatchedProcess
    said: Ready | None = None  # what it has in common with the ranks; None: it has not said so
    epoch: int = NOT_STARTED  # of the membership that it follows
    is_whole: bool = False  # whether it holds the whole state


class Shadows:
    """The shadows of this host's ranks. A context manager around the launch.

    `name` is what `job_name` returned. `arguments` say how to start a spare; None: only a user starts shadows.
    """

    def __init__(self, name: str, arguments: LaunchArguments | None) -> None:
        self._arguments = arguments
        if arguments is not None and arguments.shadow:
            os.environ[RESUME] = arguments.shadow
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{name}/{os.getpid()}.{secrets.token_hex(4)}")
        self._listener.listen(_MOST_WAITING)
        self._listener.setblocking(False)
        self._shadows: list[_Shadow] = []
        self._started: list[subprocess.Popen[bytes]] = []
        self._is_wanted = True  # none was started, or the last one has taken the place of a rank

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the shadows that were started here. They write their state after the ranks have ended."""
        self._listener.close()
        for shadow in self._shadows:
            shadow.process.close()
        for each in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.wait(_FINISH_S)

    def look(self, training: Sequence[Rank], epoch: int, card: str | None, folder: str) -> None:
        """Hear new shadows, and let those that are ready follow these ranks. Local; never blocks.

        `folder` is where the script wants a shadow to write; empty: it does not.
        """
        arguments, is_led = self._arguments, bool(training) and training[0].rank == 0 and training[0].follows
        if self._is_wanted and is_led and arguments is not None and (folder := arguments.shadow or folder):
            self._is_wanted = False
            self._start(folder, arguments)
        with contextlib.suppress(BlockingIOError):
            while True:
                end, _ = self._listener.accept()
                end.setblocking(True)
                if credentials_of_peer(end)[1] == os.getuid():
                    self._shadows.append(_Shadow(WatchedProcess(end)))
                else:
                    end.close()
        for shadow in list(self._shadows):
            self._hear_all_of(shadow)
            if shadow in self._shadows and epoch != NOT_STARTED:
                self._serve(shadow, training, epoch, card)

    def _start(self, folder: str, arguments: LaunchArguments) -> None:
        """Start the shadow that the launch was asked for."""
        flags = ["-m"] if arguments.torchrun.module else []
        words = [*flags, arguments.script, *arguments.torchrun.training_script_args]
        command = [sys.executable, "-m", "paceline", "shadow", "--spare", folder, "--", *words]
        environment = {**os.environ, LOST_AFTER: f"{arguments.lost_after_s:g}"}
        self._started.append(
            subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, env=environment)
        )

    def take_spare(self) -> tuple[WatchedProcess, Ready] | None:
        """Return a process that holds the whole state, to take the place of a lost rank, and what it has said."""
        for shadow in list(self._shadows):
            self._hear_all_of(shadow)
            is_able = shadow.is_whole and not is_stopped(shadow.process.vitals().state)
            if shadow in self._shadows and is_able and shadow.said is not None and shadow.said.is_spare:
                self._shadows.remove(shadow)
                self._is_wanted = True
                return shadow.process, shadow.said
        return None

    def _hear_all_of(self, shadow: _Shadow) -> None:
        """Take in what a shadow has said until now. It is forgotten if it has left."""
        while select.select([shadow.process.connection], [], [], 0)[0]:
            message = shadow.process.hear()
            if isinstance(message, Ready):
                shadow.said, shadow.epoch = message, NOT_STARTED
            elif isinstance(message, (CaughtUp, StillReplaying)):
                shadow.is_whole = isinstance(message, CaughtUp)
            elif message is None:
                self._shadows.remove(shadow)
                shadow.process.close()
                return

    def _serve(self, shadow: _Shadow, training: Sequence[Rank], epoch: int, card: str | None) -> None:
        if shadow.epoch == epoch:
            return
        if shadow.said is None:  # it asks whether the job has begun
            shadow.epoch = epoch
            shadow.process.tell(Following(epoch))
            return
        if card is not None and self._arguments is None:
            card = card.partition("\n")[2]  # its first line is for other hosts
        if card is not None and (why := difference(card, shadow.said.card)) is not None:
            words = f"the shadow runs another script or model: {why}. Start it as the ranks were started."
            shadow.process.tell(Refused(words))
        else:
            for share, rank in enumerate(training):
                ends = socket.socketpair()
                with ends[0], ends[1]:
                    shadow.process.tell(Receive(share, len(training)), handing=ends[0])
                    rank.process.tell(Give(epoch, share, len(training)), handing=ends[1])
        shadow.epoch = epoch
