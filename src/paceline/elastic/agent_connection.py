"""The messages between a rank and the agent of its host, and the socket between them.

Rules
1. A message is sent as JSON. Any other message ends the connection.
2. Every message about a membership carries its epoch. A message of another epoch is ignored.
3. The agent never waits for a rank: a rank that has stopped reading counts as lost.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import json
import os
import select
import socket
import sys
from collections import deque
from dataclasses import dataclass
from typing import Any

from paceline.elastic import guest
from paceline.errors import ConfigurationError, ProtocolError

FD = "PACELINE_LINE"
"""Environment variable: the descriptor of a rank's end."""
LOST_AFTER = "PACELINE_LOST_AFTER"
"""Environment variable: after how many seconds a rank that stands still counts as lost."""
SHADOW = "PACELINE_SHADOW"
"""Environment variable: the task of a process that follows the ranks of a job, as JSON."""
RESUME = "PACELINE_RESUME"
"""Environment variable: the folder of checkpoints from which training resumes, if the script names none."""
_MOST_BYTES = 64 * 1024
_FINISH_S = 20.0  # that the agent may take to end, once all its ranks have


@dataclass(frozen=True)
class ShadowOrders:
    """The task of a shadow, as `paceline shadow` writes it into the environment."""

    folder: str  # where it writes checkpoints
    keep: int  # how many it keeps
    write_every_s: float
    job: str = ""  # name of the socket at which the agent listens
    is_spare: bool = False  # whether it takes the place of a lost rank
    is_started: bool = False  # by an agent, which does not know whether the job has a shadow already

    @classmethod
    def of_this_process(cls) -> ShadowOrders | None:
        """Return the orders of this process; None: it is no shadow."""
        words = os.environ.get(SHADOW)
        return None if words is None else cls(**json.loads(words))


class Message:
    """A message between a rank and its agent: a frozen dataclass of plain values."""


# ---- a rank says


@dataclass(frozen=True)
class Ready(Message):
    """The rank has made its model, and waits for a membership."""

    card: str  # what all ranks must have in common, a fact a line
    saves: bool = False  # whether it makes a checkpoint, if training cannot go on
    shadow: str = ""  # the folder into which a shadow shall write; empty: the script asks for none
    is_spare: bool = False  # a shadow says: it takes the place of a lost rank
    follows_all: bool = False  # a shadow says: it needs the shares of all hosts' ranks


@dataclass(frozen=True)
class Trouble(Message):
    """The rank's communication failed, and it does not know why."""

    epoch: int
    words: str


@dataclass(frozen=True)
class Stopped(Message):
    """The rank has left this membership, after so many completed steps, and waits for the next one."""

    epoch: int
    step: int


@dataclass(frozen=True)
class Following(Message):
    """The rank is in the new membership, and goes on."""

    epoch: int


@dataclass(frozen=True)
class InLoop(Message):
    """The rank has entered a loop over steps, or left one."""

    inside: bool
    is_through: bool = False  # it has left because all samples of the epoch were trained, on all ranks


@dataclass(frozen=True)
class StillReplaying(Message):
    """The rank is alive, and waits for more of another rank's state. A shadow does not hold all of it."""


@dataclass(frozen=True)
class CaughtUp(Message):
    """The rank asks to be let in: it holds the state, or cannot get it while others train. A shadow holds all of it."""


@dataclass(frozen=True)
class Saved(Message):
    """The rank has made the checkpoint that it was asked for, or has failed to."""

    error: str  # in words; empty: there was none


@dataclass(frozen=True)
class Finished(Message):
    """The rank ends well. It is the first process of a container, so the kernel kills the agent with it."""


@dataclass(frozen=True)
class Notice(Message):
    """The rank was told to end soon, or its host was: it leaves between two steps."""


# ---- the agent says


@dataclass(frozen=True)
class Give(Message):
    """A rank waits to come in: send it your state while you train. An end of a socket comes with this.

    With `num_shares` the receiver is a shadow, and this rank sends one share of so many.
    """

    epoch: int
    share: int = 0
    num_shares: int = 0


@dataclass(frozen=True)
class Receive(Message):
    """Receive a rank's state over the end of a socket that comes with this.

    With `num_shares` the receiver is a shadow, and this is one share of so many, in this epoch.
    """

    share: int = 0
    num_shares: int = 0
    epoch: int = 0


@dataclass(frozen=True)
class Stop(Message):
    """This membership is over: leave its communication at once, and say where you are."""

    epoch: int
    why: str


@dataclass(frozen=True)
class Pause(Message):
    """A rank waits to come in: all leave this membership between the same two steps."""

    epoch: int
    why: str


@dataclass(frozen=True)
class RankAssignment(Message):
    """The number and group of a rank in the next membership."""

    epoch: int
    rank: int
    size: int
    num_here: int  # members on this host
    store: tuple[str, int]  # where they meet
    lost: tuple[int, ...]  # ranks of the last membership that are not in it
    num_new: int  # of its members that were not in the last one
    why: str
    members: tuple[str, ...]  # names of its processes, by rank
    others_ended: bool = False  # ranks have ended their training: no further step follows
    left: tuple[str, ...] = ()  # names of those that were told to end, and have left the last membership


@dataclass(frozen=True)
class Refused(Message):
    """The rank cannot come in."""

    why: str


@dataclass(frozen=True)
class Leave(Message):
    """The request to end with this exit code. The other ranks go on, or the job has ended."""

    why: str
    code: int
    saves: bool = False  # whether to make the checkpoint that was asked for, before
    at_once: bool = False  # whether to end wherever the rank is, because the launch ends


@dataclass(frozen=True)
class Said(Message):
    """Words of the agent to people, which the rank prints: the agent has no terminal of its own."""

    words: str


@dataclass(frozen=True)
class Ended(Message):
    """Training is over: make the checkpoint that was asked for, and end."""

    why: str


_KINDS: dict[str, Any] = {kind.__name__: kind for kind in Message.__subclasses__()}


class AgentConnection:
    """One end of the socket. Messages arrive whole and in order.

    `is_guest`: the rank has begun alone, whatever rank it gets. So does every rank with PACELINE_PEERS.
    """

    def __init__(self, end: socket.socket, is_guest: bool = False) -> None:
        self._end, self.is_guest = end, is_guest
        self.handed: deque[socket.socket] = deque()
        """Ends of sockets that have come with messages."""

    @classmethod
    def pair(cls) -> tuple[AgentConnection, socket.socket]:
        """Return the agent's end, and the rank's, which the rank inherits."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(mine), theirs

    @classmethod
    def of_this_process(cls) -> AgentConnection | None:
        """Return the rank's end; None if no agent waits for it. This process's own children get none.

        If an engine has started this rank, it connects to the agent of its host. Raises as `guest.connect` does.
        """
        number = os.environ.get(FD)
        if number is None:
            if guest.PEERS not in os.environ:
                return None
            connection = cls(guest.connect(), is_guest=True)
            if os.getpid() == 1:
                atexit.register(connection.finish)
            return connection
        try:
            os.set_inheritable(int(number), False)
            return cls(socket.socket(fileno=int(number)), is_guest=guest.PEERS in os.environ)
        except (ValueError, OSError):  # inherited the variable without the descriptor
            return None

    @classmethod
    def to_job(cls, name: str) -> AgentConnection:
        """Connect to the agent that listens at this abstract name. Raises ConfigurationError if no agent of ours does.

        A name may be taken by any process of the host, so both ends ask the kernel for the other's user.
        """
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            end.connect(f"\0{name}")
            is_ours = guest.credentials_of_peer(end)[1] == os.getuid()
        except OSError:
            is_ours = False
        if not is_ours:
            end.close()
            raise ConfigurationError("the job has ended, or is another user's: nothing is left to follow.")
        return cls(end)

    def finish(self) -> None:
        """Let the agent write down the job's end, before it is killed with this process. Nothing after an error."""
        if getattr(sys, "last_value", None) is None and self.tell(Finished()):
            poll = select.poll()
            poll.register(self._end, select.POLLRDHUP)
            poll.poll(_FINISH_S * 1000)

    def fileno(self) -> int:
        return self._end.fileno()

    def close(self) -> None:
        self._end.close()

    def tell(self, message: Message, waits: bool = True, handing: socket.socket | None = None) -> bool:
        """Send a message. Return whether it was sent: the peer may be gone, or, without `waits`, may not read.

        `handing` goes with it, and stays open here.
        """
        words = json.dumps({"kind": type(message).__name__, **vars(message)}).encode()
        with contextlib.suppress(OSError):
            rights = [] if handing is None else [array.array("i", [handing.fileno()])]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, each) for each in rights]
            self._end.sendmsg([words], ancillary, 0 if waits else socket.MSG_DONTWAIT)
            return True
        return False

    def hear(self) -> Message | None:
        """Wait for the next message; None if the other end is closed. Raises ProtocolError if it is not a message."""
        try:
            words, descriptors, _, _ = socket.recv_fds(self._end, _MOST_BYTES, 1)
        except OSError:
            return None
        for each in descriptors:
            os.set_inheritable(each, False)
            self.handed.append(socket.socket(fileno=each))
        message = decode(words) if words else None
        if isinstance(message, Leave):
            atexit.unregister(self.finish)  # the agent knows of this end, and goes on
        return message


def decode(words: bytes) -> Message:
    """Return the message that `AgentConnection.tell` sent. Raises ProtocolError if it is not one."""
    try:
        fields = json.loads(words)
        kind = _KINDS[fields.pop("kind")]
        message: Message = kind(
            **{name: tuple(value) if type(value) is list else value for name, value in fields.items()}
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ProtocolError(
            f"{words[:80]!r} is not a message between a rank and its agent: {error!r}"
        ) from error
    return message


def difference(theirs: str, mine: str) -> str | None:
    """Return how the card of a rank that comes differs from the others', in words; None: it does not."""
    if theirs == mine:
        return None
    others, own = theirs.split("\n"), mine.split("\n")
    for left, right in zip(others, own, strict=False):
        if left != right:
            return f"it has {right!r} where the others have {left!r}"
    more = (own if len(own) > len(others) else others)[min(len(own), len(others))]
    return f"{'it has' if len(own) > len(others) else 'the others have'} {more!r} besides"
