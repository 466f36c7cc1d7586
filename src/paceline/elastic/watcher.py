"""The thread that hears the agent: when a membership is over, it wakes this rank's main thread, wherever that waits.

Rules
1. The main thread says when a membership begins (`begin`) and which connections it has (`settle`). It also says when it
   has noticed the end (`acknowledge`). The thread shuts connections from the agent's word until that moment.
2. While a membership begins, every new connection of the process counts as its own, also the store's. A rank may wait
   there for one that has died. Afterwards only connections count that were opened for it.
3. The connection to the store comes last, if the main thread has not noticed by then. It may ask a store whose host is
   switched off and does not answer.
4. An accelerator waits for a lost rank for ever. So this thread withdraws the rank's vote at once. Another one aborts
   the device's collectives, which takes as long as the steps that are queued. The main thread acknowledges the end
   behind it. Otherwise the abort would meet the groups of the next membership.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from paceline.comm import connections
from paceline.comm.device_vote import DeviceExit
from paceline.comm.opened_groups import abort_ours
from paceline.elastic.agent_connection import (
    AgentConnection,
    Ended,
    Give,
    Leave,
    Notice,
    Pause,
    RankAssignment,
    Receive,
    Refused,
    Said,
    Stop,
)
from paceline.errors import PeerLostError, ReplicaMismatchError

# between two times that connections are shut: of the time since the agent's word, so that a rank that does not notice
# for long is not kept busy by it; and at least
_AGAIN_RATIO, _AGAIN_S = 0.05, 0.005
_STORE_S = 0.2  # from the agent's word until the store's is
_NOTICE_S = 1.0  # between two looks at a file, or two calls of a function, that tells of a notice
NOTICES = (signal.SIGTERM, signal.SIGUSR1)
NO_EPOCH = -1
Told = RankAssignment | Refused | Ended | Leave | socket.socket | None


class OverError(PeerLostError):
    """The membership is over: a rank was lost, or one comes in."""


class EndedError(PeerLostError):
    """Too few ranks are left, and this one is asked for a checkpoint."""


class LeavingError(PeerLostError):
    """The agent has told this rank to end: the others go on without it, or the job has ended."""

    def __init__(self, told: Leave) -> None:
        super().__init__(told.why)
        self.told = told


def when_noticed(notice: Callable[[], object] | str | os.PathLike[str], tell: Callable[[], object]) -> None:
    """Call `tell` on another thread, once the file `notice` exists or the function `notice` returns true."""
    function = notice if callable(notice) else Path(notice).exists

    def look() -> None:
        while not function():
            time.sleep(_NOTICE_S)
        tell()

    threading.Thread(target=look, name="paceline-notice", daemon=True).start()


class Watcher:
    """This rank's ear for its agent: the `epoch` of its membership, and since when (`since_s`) that is over.

    `leave` ends what an accelerator waits for (rule 4).
    """

    def __init__(self, connection: AgentConnection, leave: DeviceExit | None = None) -> None:
        self._connection, self._leave = connection, leave
        self._device_is_free = threading.Event()  # it waits for no rank of a membership that is over (rule 4)
        self._device_is_free.set()
        self._is_aborting = False
        self.epoch = NO_EPOCH
        self._over = NO_EPOCH  # the last epoch that has ended, by the agent's word
        self.why = ""  # in words
        self._pause: Pause | None = None
        self.since_s = 0.0
        self._acknowledged = True
        self._spared: frozenset[int] = frozenset()
        self._chosen: frozenset[int] | None = None
        self._to_store: frozenset[int] = frozenset()
        self._is_alone = False  # the agent is gone
        self._to_give: deque[tuple[Give, socket.socket]] = deque()
        self._assignments: queue.SimpleQueue[Told] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._noticed, self._wakes = os.pipe()  # signals, as Python's own handler writes them
        self.takes_signals = False
        self._hear_signals()
        threading.Thread(target=self._watch, name="paceline-watcher", daemon=True).start()

    # ---- for the main thread

    @property
    def is_over(self) -> bool:
        return self._over >= self.epoch

    @property
    def wants_pause(self) -> bool:
        """Return whether all shall leave it between two steps."""
        pause = self._pause
        return pause is not None and pause.epoch == self.epoch

    def begin(self, epoch: int) -> None:
        """Begin the membership of this epoch, to which new connections belong. Raises OverError if it is over."""
        with self._changed:
            self.epoch = epoch
            for order, end in self._to_give:
                if order.epoch != epoch:  # for a rank that waited in the last one
                    end.close()
            self._to_give = deque(each for each in self._to_give if each[0].epoch == epoch)
            if self._chosen is not None:  # all are out of the last one
                connections.shut(self._chosen, frozenset())
            self._spared, self._chosen = connections.connected(), None
            self._acknowledged = False
            if self._over >= epoch:
                self._acknowledged = True
                raise OverError(f"the membership of epoch {epoch} was over before it began: {self.why}")
            if self._leave is not None:
                self._leave.enter()
                self._is_aborting = False
                self._device_is_free.clear()

    def settle(self, store_port: int) -> None:
        """Note that all connections of the membership are open. Raises OverError if it is over already."""
        with self._changed:
            opened = connections.connected() - self._spared
            self._to_store = opened & connections.to_port(store_port)
            self._chosen = opened - self._to_store
            if self._over >= self.epoch:
                raise OverError(f"the membership of epoch {self.epoch} was over as it began: {self.why}")

    def acknowledge(self) -> None:
        """Note that the main thread waits for nothing. If the membership is over, end what that thread launched."""
        while not self._has_left():
            self._device_is_free.wait()

    def _has_left(self) -> bool:
        """Return False if the device has to be freed first."""
        with self._changed:
            if self.is_over and not self._acknowledged:
                self._break()
                if not self._device_is_free.is_set():
                    return False
            self._acknowledged = True
            return True

    def wait_until_over(self, limit_s: float) -> bool:
        """Return whether the membership is over within a time limit."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_over or self._is_alone, limit_s) and self.is_over

    @property
    def has_to_give(self) -> bool:
        """Return whether `to_give` returns something."""
        return bool(self._to_give)

    def to_give(self) -> tuple[Give, socket.socket] | None:
        """Return an order to give this rank's state to another process, and the socket for that; once each."""
        with self._changed:
            return self._to_give.popleft() if self._to_give else None

    def next_assignment(self) -> RankAssignment | socket.socket:
        """Return this rank's next assignment, or first where the others' state comes from; blocks.

        Raises ReplicaMismatchError if the rank cannot come in, EndedError if training does not go on, LeavingError if
        the rank does not. Raises PeerLostError if the agent is gone.
        """
        told = self._assignments.get()
        while not (self._assignments.empty() or isinstance(told, (socket.socket, Leave))):
            told = self._assignments.get()
        if isinstance(told, Leave):
            raise LeavingError(told)
        if isinstance(told, Refused):
            raise ReplicaMismatchError(told.why)
        if isinstance(told, Ended):
            raise EndedError(told.why)
        if told is None:
            raise PeerLostError(
                "the agent of this host has ended, so no process says any more which ranks train together. Start again "
                "from the last checkpoint."
                if self._connection.is_guest
                else "the launcher has ended, and with it the job: no agent says any more which ranks train together. "
                "Start again from the last checkpoint."
            )
        return told

    def begin_with(self, assignment: RankAssignment) -> None:
        """Let this be the first place that `next_assignment` returns. Local."""
        self._assignments.put(assignment)

    # ---- notices

    def _hear_signals(self) -> None:
        """Take SIGTERM and SIGUSR1 as notices, unless the script handles them. Only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            return
        mine = [each for each in NOTICES if signal.getsignal(each) is signal.SIG_DFL]
        for each in mine:
            signal.signal(each, self._take_signal)
        os.set_blocking(self._wakes, False)
        before = signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False) if mine else -1
        if before != -1:
            # The script's. The handler runs too, but later if the main thread waits in native code.
            signal.set_wakeup_fd(before)
        self.takes_signals = bool(mine)

        def forget() -> None:  # else a signal to a child would be a notice to this rank
            if signal.set_wakeup_fd(-1) != self._wakes:
                return
            for each in mine:
                signal.signal(each, signal.SIG_DFL)

        os.register_at_fork(after_in_child=forget)

    def _take_signal(self, number: int, _: FrameType | None) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wakes, bytes([number]))

    def ask(self, notice: Callable[[], object] | str | os.PathLike[str]) -> None:
        """Look for a notice from now on: a file that appears, or a function that returns something true. Local."""
        when_noticed(notice, lambda: self._connection.tell(Notice()))

    @contextlib.contextmanager
    def shielding(self) -> Iterator[None]:
        """Start processes that a notice to the whole process group does not end, such as a loader's workers. Local."""
        if not self.takes_signals:
            yield
            return
        before = signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    # ---- the thread

    def _watch(self) -> None:
        while True:
            is_breaking = self.is_over and not self._acknowledged
            again_s = max(_AGAIN_S, _AGAIN_RATIO * (time.monotonic() - self.since_s))
            ears = [self._connection.fileno(), self._noticed]
            ready = select.select(ears, [], [], again_s if is_breaking else None)[0]
            if self._noticed in ready:
                self._take_notices(os.read(self._noticed, 64))
            if self._connection.fileno() in ready:
                message = self._connection.hear()
                self._take(message)
                if message is None:
                    break
            with self._changed:
                if self.is_over and not self._acknowledged:
                    self._break()
        while True:  # the agent is gone, and a signal still has to end this process
            self._take_notices(os.read(self._noticed, 64))

    def _take_notices(self, numbers: bytes) -> None:
        told = [each for each in NOTICES if each in numbers]
        if told and not self._connection.tell(Notice()):
            # The agent is gone, and with it what the handler is for.
            os._exit(128 + told[0])

    def _break(self) -> None:
        if not (self._is_aborting or self._device_is_free.is_set()):
            self._is_aborting = True
            threading.Thread(target=self._abort, name="paceline-abort", daemon=True).start()
        abort_ours()
        connections.shut(self._chosen, self._spared)
        if self._chosen is not None and time.monotonic() - self.since_s > _STORE_S:
            connections.shut(self._to_store, self._spared)

    def _abort(self) -> None:
        assert self._leave is not None
        try:
            self._leave.abort()
        finally:
            self._device_is_free.set()

    def _take(self, message: object) -> None:
        with self._changed:
            if isinstance(message, Stop):
                if not self.is_over:
                    self.since_s = time.monotonic()
                if self._leave is not None and message.epoch >= self.epoch:
                    self._leave.withdraw()
                self._over, self.why = max(self._over, message.epoch), message.why
            elif isinstance(message, Pause):
                self._pause = message
            elif isinstance(message, Give):
                end = self._connection.handed.popleft()
                if message.epoch >= self.epoch:  # the agent may be ahead of the main thread
                    # It outlives the membership: what was given in it is still sent.
                    self._spared |= {os.fstat(end.fileno()).st_ino}
                    self._to_give.append((message, end))
                else:
                    end.close()
            elif isinstance(message, Receive):
                self._assignments.put(self._connection.handed.popleft())
            elif isinstance(message, Leave) and message.at_once:
                os._exit(message.code)  # as a signal would, whatever the main thread waits for
            elif isinstance(message, (RankAssignment, Refused, Ended, Leave)):
                self._assignments.put(message)
            elif isinstance(message, Said):
                sys.stderr.write(f"paceline: {message.words}\n")
            elif message is None:
                self._is_alone = True
                self._assignments.put(None)
            self._changed.notify_all()
