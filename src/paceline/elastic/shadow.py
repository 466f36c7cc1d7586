"""A shadow: a process that follows the training of other ranks, computes nothing, and writes checkpoints.

Rules
1. The shadow runs the script up to `Elastic(...)`, as a replacement does. It is no member: no rank waits for it, and no
   vote counts it. The agent of its host hands it one connection to each rank there, or on all hosts
   (`launch/elastic/shadows.py`, rule 3).
2. A step is applied when all givers have sent their gradients and the turn behind them (`replay.py`, rule 5). So
   the shadow always holds the state after a completed step, except while it takes a snapshot.
3. If the shadow is at the step with which a new membership begins, it goes on. Otherwise it writes its state, and takes
   a snapshot.
4. It copies its state for a checkpoint, and a thread writes the copy. Givers wait for neither.
5. When all ranks are gone, it writes what it holds.
6. A spare is a shadow that the launch has started. The agent lets it take the place of a lost rank, if it holds the
   whole state. Then it is a member like others, and the launch starts another shadow.
7. If an optimizer is sharded, the shadow stays one, and hands its state over to a rank that asks for it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from paceline.elastic.agent_connection import (
    AgentConnection,
    CaughtUp,
    RankAssignment,
    Ready,
    Receive,
    Refused,
    ShadowOrders,
    StillReplaying,
    Trouble,
)
from paceline.elastic.checkpoints import CheckpointFolder, FolderInUseError, snapshot
from paceline.elastic.handover import Carried, Piece
from paceline.elastic.replay import CONFIRMED, HELD_BYTES, FrameReader, Replayed, send_frame, take
from paceline.elastic.state_tree import pack
from paceline.errors import ConfigurationError, PacelineError, ReplicaMismatchError
from paceline.host.processes import available_bytes

_NO_STEP = -1
_MOST_DIFFERENCES, _ROW_STEPS = 3, 1000  # in a row, each within so many steps: then the script is at fault


@dataclass(frozen=True)
class Promotion:
    """The place of a lost rank, which a shadow takes. `held` is the shadow's state, None if it is not complete."""

    connection: AgentConnection
    assignment: RankAssignment
    held: Replayed | None


@dataclass
class _Bundle:
    """The frames of one giver up to a turn."""

    turn: int | None = None  # the step that the turn completes; None: the giver ended before
    is_snapshot: bool = False  # a snapshot begins in it
    is_whole: bool = False  # and all parts were sent
    parts: list[Any] = field(default_factory=list)
    gradients: list[Any] = field(default_factory=list)
    tree: dict[str, Any] = field(default_factory=dict)  # of the turn


class _Stream:
    """The connection to one giver: `ahead` is what it has sent and the shadow has not applied."""

    def __init__(self, end: socket.socket, index: int) -> None:
        self._end, self.index = end, index
        self._reader = FrameReader(end)
        self.ahead, self.asked_for = _Bundle(), _NO_STEP
        self.is_first = True  # nothing was applied yet
        self.is_valid = False  # the shadow holds its parameters as they were behind the last turn
        self.is_complete = False  # all of them
        self.has_ended = False

    def ask(self, step: int) -> None:
        """Say which step the shadow holds. A giver that is gone hears nothing."""
        self.asked_for = step
        self._say(step)

    @property
    def is_here(self) -> bool:
        """Return whether the giver is on this host."""
        return self._end.family == socket.AF_UNIX

    def confirm(self, step: int) -> None:
        """Say that this turn has been applied.

        A giver on another host is told only if it asks. One that dies with unread bytes resets its connection, and
        what it has not sent over TCP is lost.
        """
        self._say(CONFIRMED - step)

    def _say(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self._end.sendall(number.to_bytes(HELD_BYTES, "big", signed=True))

    def hand_over(self, tree: dict[str, Any]) -> None:
        """Send a whole state. A giver that is gone hears nothing."""
        with contextlib.suppress(OSError):
            send_frame(self._end, pack(tree))

    @property
    def lacks_turn(self) -> bool:
        """Return whether the next turn may come, and is not there yet."""
        return self.ahead.turn is None and not self.has_ended

    def fileno(self) -> int:
        return self._end.fileno()

    def read(self) -> dict[str, Any] | None:
        """Take in a frame. Return it if it is neither of a step nor of a snapshot. Blocks."""
        bundle, tree = self.ahead, None
        # The giver may have been killed, or the peer may be no giver.
        with contextlib.suppress(OSError, PacelineError, ValueError):
            tree = self._reader.read()
        if tree is None:
            self.has_ended = True
        elif "turn" in tree:
            bundle.turn, bundle.tree = tree["turn"], tree
        elif "snapshot" in tree:
            bundle.is_snapshot, bundle.is_whole = True, False
            bundle.parts, bundle.gradients = [], []
        elif "is_whole" in tree:
            bundle.is_whole = True
        elif "state" in tree:
            bundle.parts.append(tree)
        elif "gradients" in tree:
            bundle.gradients.append(tree)
        else:
            return {**tree}
        return None

    def close(self) -> None:
        self._end.close()


class Shadow:
    """Follows the ranks of a job with `carried`, and writes checkpoints into `folder` as `orders` say.

    `says_whole` is told whether the shadow holds the whole state, whenever that changes.
    """

    def __init__(
        self,
        carried: Carried,
        folder: CheckpointFolder,
        orders: ShadowOrders,
        says_whole: Callable[[bool], object] = lambda _: None,
    ) -> None:
        self._carried, self._folder, self._orders = carried, folder, orders
        self._says_whole = says_whole
        self.step, self.is_whole = _NO_STEP, False
        self._rest: dict[str, Any] = {}  # of the last step that was applied
        self._streams: list[_Stream] = []
        self._num_differences, self._differed_at = 0, 0
        self._written, self._written_s = _NO_STEP, -math.inf
        self._writer: threading.Thread | None = None

    # ---- following

    def begin(self, ends: Sequence[socket.socket]) -> None:
        """Follow these givers, in the order of their shares."""
        self._streams = [_Stream(end, index) for index, end in enumerate(ends)]
        for each in self._streams:
            each.ask(self.step if self.is_whole else _NO_STEP)

    def follow(self) -> None:
        """Apply step after step until the givers end. Blocks."""
        try:
            while self._advance():
                if self.is_whole and time.monotonic() - self._written_s >= self._orders.write_every_s:
                    self._write_aside()
        finally:
            for each in self._streams:
                each.close()
        if self.is_whole and not self._orders.is_spare:
            self._write_aside()  # an engine may start all ranks again at once, which resume then

    def _advance(self) -> bool:
        """Apply what comes next. Return False if nothing does: what a shadow holds then is a completed step."""
        while waiting := {each.fileno(): each for each in self._streams if each.lacks_turn}:
            poll = select.poll()
            for number in waiting:
                poll.register(number, select.POLLIN)
            for number, _ in poll.poll():
                self._read(waiting[number])
        ready = [each for each in self._streams if each.ahead.turn is not None]
        if not ready:
            return False
        turn = min(each.ahead.turn or 0 for each in ready)
        taken = [each for each in ready if each.ahead.turn == turn]
        if self.is_whole:
            lacking = self._lacking(turn, taken)
            if any(each.has_ended for each in lacking):
                return False
            if lacking:
                self._lose(f"step {self.step + 1} did not come from all ranks")
        gradients = max(len(each.ahead.gradients) for each in taken)
        salvaged = [
            each
            for each in self._streams
            if self.is_whole
            and each.has_ended
            and each not in ready
            and len(each.ahead.gradients) == gradients
        ]
        self._apply(turn, [*taken, *salvaged])
        return True

    def _read(self, stream: _Stream) -> None:
        """Read a frame of a giver, and answer what it asks. Blocks until all of it is there."""
        tree = stream.read() or {}
        if "wants_state" in tree:
            stream.hand_over({**self._carried.whole_tree(), **self._rest})
        elif "wants_word" in tree:
            stream.confirm(self.step)
        elif tree:
            self._check(tree)

    def _lacking(self, turn: int, taken: Sequence[_Stream]) -> list[_Stream]:
        """Return the streams without which this turn cannot be applied to a whole state."""
        gradients = max(len(each.ahead.gradients) for each in taken)
        if turn not in (self.step, self.step + 1):
            return [*self._streams]
        is_next = turn > self.step or gradients > 0
        lacking = [each for each in taken if each.ahead.is_snapshot or (each.is_first and turn != self.step)]
        for each in self._streams:
            # Of a rank that was killed behind its gradients only the turn is missing, and the others' says the same.
            is_killed = each.has_ended and each.index != 0 and len(each.ahead.gradients) == gradients
            if (is_next or each.is_first) and each not in taken and not is_killed:
                lacking.append(each)
        return lacking

    def _apply(self, turn: int, streams: Sequence[_Stream]) -> None:
        bundles = [each.ahead for each in streams]
        if turn > self.step:
            for each in self._streams:
                if each not in streams:  # its share of this step never comes, only a snapshot does
                    each.is_valid = each.is_complete = False
        for each in streams:
            if each.is_first:
                each.is_first = False
                each.is_valid = each.is_complete = self.is_whole
                if not self.is_whole and turn == each.asked_for:  # then it sends no snapshot by itself
                    each.ask(_NO_STEP)
            if each.ahead.is_snapshot:
                each.is_valid, each.is_complete = True, False
            each.is_complete = each.is_complete or each.ahead.is_whole
        for part in itertools.chain.from_iterable(each.parts for each in bundles):
            take(part, self._carried)
        valid = [each.ahead.gradients for each in streams if each.is_valid]
        for frames in itertools.zip_longest(*valid):
            found = [each for each in frames if each is not None]
            gradients = [each for frame in found for each in frame["gradients"]]
            take({**found[0], "gradients": gradients}, self._carried)
        rest = self._streams[0].ahead.tree.get("rest") if self._streams[0] in streams else None
        if rest is not None:
            self._rest = rest
        for each in streams:
            each.ahead = _Bundle()
        was_whole, self.step = self.is_whole, turn
        self.is_whole = all(each.is_complete and each.is_valid for each in self._streams) and bool(self._rest)
        if self.is_whole != was_whole:
            self._says_whole(self.is_whole)
        if self.is_whole and not was_whole:
            self._note(f"follows the training from step {turn} on")
        if self.is_whole:
            self._compare(bundles)
        for each in self._streams:
            if each.is_here:
                each.confirm(turn)

    def _compare(self, bundles: Sequence[_Bundle]) -> None:
        """Compare digests of bits with those of the givers."""
        digests = [each for bundle in bundles for each in bundle.tree.get("digests", ())]
        for place, run, theirs in digests:
            if self._carried.digest_of(Piece(place, run)) == theirs:
                continue
            name = self._carried.names()[place]
            words = f"{name}, or its state in the optimizer, has other bits than on the ranks after step {self.step}"
            is_in_a_row = self.step - self._differed_at < _ROW_STEPS
            self._num_differences = self._num_differences + 1 if is_in_a_row else 1
            self._differed_at = self.step
            if self._num_differences >= _MOST_DIFFERENCES:
                raise ReplicaMismatchError(
                    f"the shadow cannot follow: {words}, {_MOST_DIFFERENCES} times in a row. What changes parameters "
                    "other than by optimizer.step() is not followed. Leave it out, or save checkpoints by "
                    "Elastic(checkpoint=...)."
                )
            self._is_not_whole()
            self._note(f"error: {words}; takes a new snapshot")
            self._ask_for_snapshot()
            return

    def _lose(self, why: str) -> None:
        self._note(f"fell behind after step {self.step}: {why}; takes a new snapshot")
        if self.step > self._written:
            self._finish_writing()
            self._write_aside()
        self._is_not_whole()

    def _is_not_whole(self) -> None:
        self.is_whole = False
        self._says_whole(False)

    def _ask_for_snapshot(self) -> None:
        for each in self._streams:
            each.is_valid = each.is_complete = False
            each.ask(_NO_STEP)

    def _check(self, tree: dict[str, Any]) -> None:
        """Refuse what cannot be followed, by what a giver says at first. Those on this host share memory."""
        if "refused" in tree:
            raise ConfigurationError(f"the shadow cannot follow: {tree['refused']}")
        if self._rest or "bytes" not in tree:
            return
        num_here = sum(each.is_here for each in self._streams)
        gradients = 2 * sum(each.nbytes for each in self._carried.parameters) * num_here // len(self._streams)
        if why := _lacks_memory(2 * tree["bytes"] + gradients):
            raise ConfigurationError(
                f"the shadow holds the state, a copy that is written, and gradients of two steps: it {why}"
            )

    # ---- writing

    def _write_aside(self) -> None:
        """Copy what the shadow holds, and let a thread write it, unless one still writes."""
        if self.step <= self._written or (self._writer is not None and self._writer.is_alive()):
            return
        self._carried.take(self._rest, is_new=False)
        if why := _lacks_memory(sum(each.nbytes for each in self._carried.whole().tensors)):
            self._note(f"step {self.step} was not written: the copy {why}")
            self._written_s = time.monotonic()
            return
        copy = snapshot(self._carried, self._rest)
        self._written_s = time.monotonic()

        def write() -> None:
            why = self._folder.write(copy)
            if why:
                self._note(f"step {copy.step} was not written: {why}")
            else:
                self._written = copy.step

        self._writer = threading.Thread(target=write, name="paceline-checkpoint")
        self._writer.start()

    def _finish_writing(self) -> None:
        if self._writer is not None:
            self._writer.join()

    def finish(self) -> None:
        """Write what the shadow holds, if that is not written. Blocks."""
        self._finish_writing()
        if self.is_whole:
            self._write_aside()
            self._finish_writing()
        newest = self._folder.newest()
        self._note("no checkpoint was written" if newest is None else f"the newest checkpoint is {newest}")

    def release(self) -> Replayed | None:
        """Leave the folder to another shadow. Return what this one holds, or None if not all of it."""

        def close() -> None:
            self._finish_writing()
            self._folder.close()

        threading.Thread(target=close, name="paceline-checkpoint").start()
        return Replayed(self.step, self._carried.digest()) if self.is_whole else None

    def _note(self, words: str) -> None:
        sys.stderr.write(f"paceline shadow: {words}\n")


def _lacks_memory(num_bytes: int) -> str:
    """Return in words that so many bytes are not free, or an empty text."""
    free = available_bytes()
    if not 0 < free < num_bytes:
        return ""
    return (
        f"needs {num_bytes:,} bytes, and {free:,.0f} are free. Start the shadow on a host with more memory."
    )


class _TerminatedError(BaseException):
    """A signal asks this process to end. No handler of a giver's errors may catch it."""


def run(orders: ShadowOrders, carried: Carried, card: str, saves: bool) -> Promotion:
    """Follow the job until this process takes the place of a lost rank, or the job ends. Blocks.

    Args:
        orders: The task.
        carried: The state that follows.
        card: What this process has in common with the ranks.
        saves: Whether it makes a checkpoint as a rank, if training cannot go on.

    Raises:
        SystemExit: The job has ended, or this process was asked to end. What the shadow held is written.
        ConfigurationError: The shadow cannot follow; with the reason.
        ReplicaMismatchError: This process has another model, version or data set than the ranks.
    """
    folder = CheckpointFolder(orders.folder, card, orders.keep)
    try:
        folder.open()
    except FolderInUseError as error:
        if not orders.is_started:
            raise
        sys.stderr.write(f"paceline shadow: ends, because {error}\n")
        raise SystemExit(0) from None
    try:
        connection = AgentConnection.to_job(orders.job)
    except ConfigurationError:
        if not orders.is_spare:
            raise
        sys.stderr.write("paceline shadow: the job ended before its shadow was there\n")
        raise SystemExit(0) from None
    shadow = Shadow(
        carried,
        folder,
        orders,
        lambda is_whole: connection.tell(CaughtUp() if is_whole else StillReplaying()),
    )
    is_divided = carried.is_divided
    connection.tell(Ready(card, saves, is_spare=orders.is_spare and not is_divided, follows_all=is_divided))
    before = {number: signal.signal(number, _raise_terminated) for number in (signal.SIGTERM, signal.SIGINT)}
    with contextlib.suppress(_TerminatedError):
        if (assignment := _obey(connection, shadow)) is not None:
            for number, handler in before.items():
                signal.signal(number, handler)
            return Promotion(connection, assignment, shadow.release())
    shadow.finish()
    raise SystemExit(0)


def _raise_terminated(number: int, _: FrameType | None) -> None:
    for each in (signal.SIGTERM, signal.SIGINT):  # one is enough
        signal.signal(each, signal.SIG_IGN)
    raise _TerminatedError(signal.Signals(number).name)


def _obey(connection: AgentConnection, shadow: Shadow) -> RankAssignment | None:
    """Follow one membership after the other, as the agent says. Return a place in one; None: the agent is gone."""
    ends: dict[int, socket.socket] = {}  # by share
    epoch = 0
    while (message := connection.hear()) is not None:
        if isinstance(message, Refused):
            raise ReplicaMismatchError(message.why)
        if isinstance(message, RankAssignment):
            return message
        if not isinstance(message, Receive):
            continue
        end = connection.handed.popleft()
        if message.epoch < epoch:  # from another host, which had not heard of its end
            end.close()
            continue
        if message.epoch > epoch:
            for each in ends.values():
                each.close()
            ends, epoch = {}, message.epoch
        ends[message.share] = end
        if len(ends) == message.num_shares:
            shadow.begin([ends[share] for share in sorted(ends)])
            shadow.follow()
            ends = {}
            connection.tell(Trouble(epoch, "a rank's share has ended"))  # perhaps its connection alone
    return None
