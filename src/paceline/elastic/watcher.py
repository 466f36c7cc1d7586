"""The thread that hears the agent: when a membership is over, it wakes this rank's main thread, wherever that waits.

Rules
1. The main thread says when a membership begins (`begin`) and which connections it has (`settle`). It also says when it
   has noticed the end (`acknowledge`). The thread shuts connections from the agent's word until that moment.
2. While a membership begins, every new connection of the process counts as its own, also the store's. A rank may wait
   there for one that has died. Afterwards only connections count that were opened for it.
3. The connection to the store comes last, if the main thread has not noticed by then. It may ask a store whose host is
   switched off and does not answer.
"""

from __future__ import annotations

import queue
import select
import socket
import threading
import time
from collections import deque

from paceline.comm import connections
from paceline.comm.opened_groups import abort_ours
from paceline.elastic.agent_connection import (
    AgentConnection,
    Ended,
    Give,
    Pause,
    RankAssignment,
    Receive,
    Refused,
    Stop,
)
from paceline.errors import PeerLostError, ReplicaMismatchError

# between two times that connections are shut: of the time since the agent's word, so that a rank that does not notice
# for long is not kept busy by it; and at least
_AGAIN_RATIO, _AGAIN_S = 0.05, 0.005
_STORE_S = 0.2  # from the agent's word until the store's is
NO_EPOCH = -1


class OverError(PeerLostError):
    """The membership is over: a rank was lost, or one comes in."""


class EndedError(PeerLostError):
    """Too few ranks are left, and this one is asked for a checkpoint."""


class Watcher:
    """This rank's ear for its agent: the `epoch` of its membership, and since when (`since_s`) that is over."""

    def __init__(self, line: AgentConnection) -> None:
        self._line = line
        self.epoch = NO_EPOCH
        self._over = NO_EPOCH  # the last epoch that has ended, by the agent's word
        self._why = ""
        self._pause: Pause | None = None
        self.since_s = 0.0
        self._acknowledged = True
        self._spared: frozenset[int] = frozenset()
        self._chosen: frozenset[int] | None = None
        self._to_store: frozenset[int] = frozenset()
        self._is_alone = False  # the agent is gone
        self._to_give: deque[socket.socket] = deque()
        self._seats: queue.SimpleQueue[RankAssignment | Refused | Ended | socket.socket | None] = (
            queue.SimpleQueue()
        )
        self._changed = threading.Condition()
        threading.Thread(target=self._watch, name="paceline-watcher", daemon=True).start()

    # ---- for the main thread

    @property
    def is_over(self) -> bool:
        """Return whether the membership that this rank is in has ended."""
        return self._over >= self.epoch

    @property
    def why(self) -> str:
        """Return why it has, in words."""
        return self._why

    @property
    def wants_pause(self) -> bool:
        """Return whether all shall leave it between two steps."""
        pause = self._pause
        return pause is not None and pause.epoch == self.epoch

    def begin(self, epoch: int) -> None:
        """The membership of this epoch begins: what is connected from now on is its own. Raises OverError if late."""
        with self._changed:
            self.epoch = epoch
            while self._to_give:
                self._to_give.popleft().close()  # for who waited in the last one
            if self._chosen is not None:  # all are out of the last one
                connections.shut(self._chosen, frozenset())
            self._spared, self._chosen = connections.connected(), None
            self._acknowledged = False
            if self._over >= epoch:
                self._acknowledged = True
                raise OverError(f"the membership of epoch {epoch} was over before it began: {self._why}")

    def settle(self, store_port: int) -> None:
        """All of its connections are open. Raises OverError if it is over already."""
        with self._changed:
            opened = connections.connected() - self._spared
            self._to_store = opened & connections.to_port(store_port)
            self._chosen = opened - self._to_store
            if self._over >= self.epoch:
                raise OverError(f"the membership of epoch {self.epoch} was over as it began: {self._why}")

    def acknowledge(self) -> None:
        """The main thread waits for nothing any more. What it has launched, and not waited for, ends."""
        with self._changed:
            if self.is_over and not self._acknowledged:
                self._break()
            self._acknowledged = True

    def wait_until_over(self, limit_s: float) -> bool:
        """Return whether the membership is over within a time limit."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_over or self._is_alone, limit_s) and self.is_over

    def to_give(self) -> socket.socket | None:
        """Return the socket of a rank that waits to come in and shall have this rank's state meanwhile; once each."""
        with self._changed:
            return self._to_give.popleft() if self._to_give else None

    def next_seat(self) -> RankAssignment | socket.socket:
        """This rank's next place, or first where the others' state comes from; blocks.

        Raises:
            ReplicaMismatchError: It cannot come in.
            EndedError: Training does not go on.
            PeerLostError: The agent is gone.
        """
        told = self._seats.get()
        while not (self._seats.empty() or isinstance(told, socket.socket)):
            told = self._seats.get()
        if isinstance(told, Refused):
            raise ReplicaMismatchError(told.why)
        if isinstance(told, Ended):
            raise EndedError(told.why)
        if told is None:
            raise PeerLostError(
                "the launcher has ended, and with it the job: nobody says any more which ranks train together. "
                "Start again from the last checkpoint."
            )
        return told

    # ---- the thread

    def _watch(self) -> None:
        while True:
            is_breaking = self.is_over and not self._acknowledged
            again_s = max(_AGAIN_S, _AGAIN_RATIO * (time.monotonic() - self.since_s))
            if select.select([self._line], [], [], again_s if is_breaking else None)[0]:
                message = self._line.hear()
                self._take(message)
                if message is None:
                    return
            with self._changed:
                if self.is_over and not self._acknowledged:
                    self._break()

    def _break(self) -> None:
        abort_ours()
        connections.shut(self._chosen, self._spared)
        if self._chosen is not None and time.monotonic() - self.since_s > _STORE_S:
            connections.shut(self._to_store, self._spared)

    def _take(self, message: object) -> None:
        with self._changed:
            if isinstance(message, Stop):
                if not self.is_over:
                    self.since_s = time.monotonic()
                self._over, self._why = max(self._over, message.epoch), message.why
            elif isinstance(message, Pause):
                self._pause = message
            elif isinstance(message, Give):
                end = self._line.handed.popleft()
                if message.epoch == self.epoch:
                    self._to_give.append(end)
                else:
                    end.close()
            elif isinstance(message, Receive):
                self._seats.put(self._line.handed.popleft())
            elif isinstance(message, (RankAssignment, Refused, Ended)):
                self._seats.put(message)
            elif message is None:
                self._is_alone = True
                self._seats.put(None)
            self._changed.notify_all()
