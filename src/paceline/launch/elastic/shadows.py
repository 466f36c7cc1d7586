"""Shadows: processes that follow the ranks of this host, and are no members. How they find the job and its ranks.

Rules
1. The agent listens at an abstract Unix socket, whose name has the user, a digest of the script with its arguments, and
   the agent's pid. `paceline shadow` finds it in /proc/net/unix. The kernel removes the name with the agent.
2. Both ends ask the kernel for the other's user. A process of another user is not heard.
3. In each membership every rank of this host gets an end of a connection to each shadow, and sends its share. The agent
   hands the ends over, and never waits for a shadow. If an optimizer is sharded, the ranks of all hosts do: each has a
   part of the state. Else those of this host suffice, whose gradients take no network.
4. With `--shadow FOLDER`, or if the script asks for it, the agent of rank 0 starts a `paceline shadow`, when training
   has begun, and another one if that has died. It is a spare: it takes the place of a lost rank, and the agent starts
   another one. The folder's lock keeps a second one out.
5. Where an engine starts the ranks of several hosts, a host for which there is no room starts the shadow. The shadow
   follows the ranks of all other hosts, and ends when its own host trains. It is no spare: the engine replaces lost
   ranks. If all ranks of the other hosts are lost, those of this host begin anew from what the shadow has written.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

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
    Trouble,
    difference,
)
from paceline.elastic.guest import LOCAL, PEERS, PREPARED, credentials_of_peer
from paceline.host.processes import is_stopped
from paceline.launch.elastic.local_ranks import Rank
from paceline.launch.elastic.plan import NOT_STARTED
from paceline.launch.elastic.rank_process import WatchedProcess

if TYPE_CHECKING:
    from typing_extensions import Self

_MOST_WAITING = 8
_FINISH_S = 300.0  # that a shadow may take to write what it holds
_PAUSE_S = 10.0  # before one that has ended is started again, then twice as long each time
_MOST_PAUSE_S = 600.0  # the same at most, if it did not fail
_AGAIN_S = 1.0  # before one whose connections have ended follows the same membership again


@dataclass
class _Shadow:
    """One shadow."""

    process: WatchedProcess
    said: Ready | None = None  # what it has in common with the ranks; None: it has not said so
    epoch: int = NOT_STARTED  # of the membership that it follows
    is_whole: bool = False  # whether it holds the whole state
    again_s: float = math.inf  # when it may follow the same membership again, if its connections have ended


@dataclass(frozen=True)
class ShadowStart:
    """The way in which an agent starts a shadow."""

    words: Sequence[str]  # the script and its arguments; before them `-m` for a module
    lost_after_s: float
    folder: str = ""  # where it writes; empty: where the script wants
    peers: str | None = None  # if an engine starts the ranks: where the other hosts are

    @property
    def is_elsewhere(self) -> bool:
        """Return whether it follows the ranks of other hosts."""
        return self.peers not in (None, LOCAL)

    def command(self, name: str) -> list[str]:
        """Return the options of `paceline shadow` behind the folder, and the script. `name` is the agent's socket's."""
        options = ["--peers", str(self.peers)] if self.is_elsewhere else []
        return [*options, "--agent", name, *["--spare"] * (self.peers is None), "--", *self.words]


@dataclass(frozen=True)
class Followed:
    """A membership, as the shadows of one host follow it."""

    epoch: int
    ranks: Sequence[Rank]  # of this host, by their numbers
    size: int  # how many ranks there are on all hosts
    card: str | None  # what the ranks have in common
    ask_others: Callable[[int, Callable[[int, socket.socket], bool]], None]  # `Decider.ask_for_shares`


class Shadows:
    """The shadows of this host's ranks. A context manager around the launch.

    `name` is what `job_name` returned. `note` is called with what shadows say that have no terminal.
    """

    def __init__(self, name: str, start: ShadowStart, note: Callable[[str], None]) -> None:
        self._how, self._note = start, note
        if start.folder:
            os.environ[RESUME] = start.folder
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._name = f"{name}/{os.getpid()}.{secrets.token_hex(4)}"
        self._listener.bind(f"\0{self._name}")
        self._listener.listen(_MOST_WAITING)
        self._listener.setblocking(False)
        self._shadows: list[_Shadow] = []
        self._started: list[subprocess.Popen[bytes]] = []
        self._is_ending = False  # those that were started have been told to end
        self._is_wanted = True  # none was started, or the last one has taken the place of a rank
        self._again_s, self._pause_s = 0.0, _PAUSE_S  # when the next one may start, if one has ended

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the shadows that were started here. They write their state after the ranks have ended."""
        self._listener.close()
        for shadow in self._shadows:
            shadow.process.close()
        self.finish()
        for each in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.wait(_FINISH_S)

    def look(self, followed: Followed, folder: str, is_spare: bool) -> None:
        """Hear new shadows, and let those that are ready follow this membership. Local; never blocks.

        `folder` is where the script wants a shadow to write; empty: it does not. `is_spare` says whether this
        host waits because there is no room.
        """
        training = followed.ranks
        is_led = bool(training) and training[0].rank == 0 and training[0].follows
        is_due = is_spare and not training if self._how.is_elsewhere else is_led
        if self._is_wanted and is_due and (folder := self._how.folder or folder):
            self._start(folder)
        else:
            self._look_at_started(is_due)
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
            is_due = shadow.epoch != followed.epoch or time.monotonic() >= shadow.again_s
            if shadow in self._shadows and is_due and followed.epoch != NOT_STARTED:
                self._serve(shadow, followed)

    def finish(self) -> bool:
        """Have a shadow that was started here and follows other hosts write and end. Return whether it has."""
        if self._how.is_elsewhere:
            self._end_started()
        return not self._how.is_elsewhere or all(each.poll() is not None for each in self._started)

    def _start(self, folder: str) -> None:
        """Start the shadow that was asked for."""
        how = self._how
        command = [sys.executable, "-m", "paceline", "shadow", folder, *how.command(self._name)]
        has_terminal = how.peers is None
        dropped = () if has_terminal else (PEERS, PREPARED)  # the shadow is no rank of the engine
        environment = {name: each for name, each in os.environ.items() if name not in dropped}
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=None if has_terminal else subprocess.PIPE,
            stderr=None if has_terminal else subprocess.STDOUT,
            start_new_session=True,
            env=environment | {LOST_AFTER: f"{how.lost_after_s:g}"},
        )
        self._started.append(process)
        self._is_wanted = self._is_ending = False
        if process.stdout is not None:
            threading.Thread(target=self._pass_on, args=(process.stdout,), daemon=True).start()

    def _pass_on(self, said: IO[bytes]) -> None:
        with said:
            for line in said:
                self._note(line.decode(errors="replace").rstrip())

    def _look_at_started(self, is_due: bool) -> None:
        """End one that follows other hosts and is not due any more. One that has ended or died is started again."""
        now_s = time.monotonic()
        if self._how.is_elsewhere and not is_due:
            self._end_started()
        code = self._started[-1].poll() if self._started else None
        if code is not None and now_s >= self._again_s:
            self._started.clear()
            self._is_wanted, self._again_s = True, now_s + self._pause_s
            # One that fails may fail always, and says so each time. With code 0 another one was there.
            self._pause_s = 2 * self._pause_s if code else min(2 * self._pause_s, _MOST_PAUSE_S)

    def _end_started(self) -> None:
        """Have the shadows that were started here write what they hold, and end. A second signal would disturb them."""
        for each in self._started:
            if not self._is_ending:
                each.terminate()
        self._is_ending = True

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
                self._pause_s = _PAUSE_S
            elif isinstance(message, Trouble) and message.epoch == shadow.epoch:
                shadow.again_s = time.monotonic() + _AGAIN_S
            elif message is None:
                self._shadows.remove(shadow)
                shadow.process.close()
                return

    def _serve(self, shadow: _Shadow, followed: Followed) -> None:
        epoch, card, tell = followed.epoch, followed.card, shadow.process.tell
        shadow.epoch, shadow.again_s = epoch, math.inf
        if shadow.said is None:  # it asks whether the job has begun
            tell(Following(epoch))
            return
        if card is not None and self._how.peers is not None:
            card = card.partition("\n")[2]  # its first line is for other hosts
        if card is not None and (why := difference(card, shadow.said.card)) is not None:
            words = f"the shadow runs another script or model: {why}. Start it as the ranks were started."
            tell(Refused(words))
            return
        follows_all = shadow.said.follows_all
        size = followed.size if follows_all else len(followed.ranks)
        for place, rank in enumerate(followed.ranks):
            share, ends = rank.rank if follows_all else place, socket.socketpair()
            with ends[0], ends[1]:
                tell(Receive(share, size, epoch), handing=ends[0])
                rank.process.tell(Give(epoch, share, size), handing=ends[1])
        if len(followed.ranks) < size:
            followed.ask_others(epoch, lambda share, end: tell(Receive(share, size, epoch), handing=end))
