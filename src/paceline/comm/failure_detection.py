"""Failure detection: ranks ask each other through the job's store which of them died, hang or cannot be reached.

A rank whose collective failed starts *failure detection*. It writes what it was doing into the job's store, and gives
the others a moment to do the same. It does not wait for ranks that have left, or died on this host. A rank that waits
for a collective asks the store twice a second whether failure detection has begun. Then it answers, and fails, too. A
rank that has not answered is looked up by its process id if it is on this host.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import ClassVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from paceline.comm import connections
from paceline.comm.rendezvous import announce
from paceline.comm.sealed_store import SealedStore
from paceline.host.exit import end_before_exit
from paceline.host.processes import GONE, UNKNOWN, ProcessIdentity, is_stopped

SLICE_S = 0.5  # between two looks whether failure detection has begun
GRACE_S = 2.0  # for the others to answer
_FIRST_LOOK_S, _LAST_LOOK_S = 0.02, 0.2  # at who does not answer: each after twice the time of the one before
_MOST_ASKED = 3
_MOST_DROPPED = 16  # of which the end of this rank is still told

_dropped: deque[weakref.finalize[[SealedStore, int, _Progress], ProcessGroup]] = deque()


class CalledError(RuntimeError):
    """Another rank has started failure detection; the message says why."""


@dataclass
class _Progress:
    """The progress of this rank; outlives the object that waits."""

    num_steps: int | None = None
    has_left: bool = False  # it has said why, while its program goes on
    is_store_busy: bool = False  # a query that hangs holds the store's lock

    @property
    def next_step(self) -> int:
        """Return the number of the step under way, or -1 if it is unknown."""
        return -1 if self.num_steps is None else self.num_steps + 1


class FailureDetection:
    """Asks the ranks of a group, through the store, which still answer; `still_asks`: `learn` may find out more."""

    def __init__(self, process_group: ProcessGroup, name: str, first_act: str) -> None:
        self._rank = process_group.rank()
        self._num_ranks = process_group.size()
        self._first_act = first_act
        self._has_store = True
        self.still_asks = self._num_ranks > 1
        self._query: _StoreQuery | None = None
        self._cards: dict[int, ProcessIdentity] = {}
        self._num_asked = 0
        self.progress = _Progress()
        try:
            default_store = dist.distributed_c10d._get_default_store()
            self._store = SealedStore(dist.PrefixStore(f"paceline/{name}", default_store), name)
            if self._num_ranks > 1:
                self._store.set(f"who/{self._rank}", ProcessIdentity.of_this_process().words)
                announce(dist.PrefixStore("paceline", default_store), dist.get_rank())
                # When the group is destroyed or the program ends, whichever is first.
                leaves = weakref.finalize(process_group, _say_left, self._store, self._rank, self.progress)
                weakref.finalize(self, _forget_oldest, leaves).atexit = False
        except (RuntimeError, TypeError, ValueError):  # MPI, or no default group: there is no store
            self._has_store = self.still_asks = False
            self._store = SealedStore(dist.HashStore(), name)

    def learn(self) -> None:
        """Read who the others are while the store still answers; only in the first waits. Local."""
        self._num_asked += 1
        self.still_asks = self._num_asked < _MOST_ASKED
        others = [rank for rank in range(self._num_ranks) if rank != self._rank]
        with contextlib.suppress(RuntimeError):
            if all(self._card(rank) is not None for rank in others):
                self.still_asks = False

    def raise_if_called(self) -> None:
        """Poll the store; raises RuntimeError if another rank has started failure detection."""
        if self._has_store and (self._query is None or not self._query.is_alive()):
            self._query = _StoreQuery(self._store, "failure_detection")
            reason = self._query.answer(SLICE_S)
            if reason is not None:
                raise CalledError(
                    f"another rank has started failure detection ({reason.decode(errors='replace')})"
                )

    def leave(self, why: str) -> None:
        """Tell the other ranks that this one has left, as `Peers.leave` does."""
        self.progress.has_left = True
        if self._has_store and not _StoreQuery.some_hangs():
            with contextlib.suppress(RuntimeError):
                self._store.set(f"left/{self._rank}", why)
                self._store.set("failure_detection", f"rank {self._rank} {why}")

    def who_is_gone(self, doing: str, named: int | None, reason: str | None) -> tuple[str, bool]:
        """Start failure detection, or join it without a `reason`. Return who is missing, and whether surely none is."""
        if not self._has_store:
            return "this job has no store in which to ask who still answers", False
        if self._query is not None:
            self._query.join(GRACE_S)  # on a busy machine it may be late without hanging
        self.progress.is_store_busy = self._query is not None and self._query.is_alive()
        silent = None if self.progress.is_store_busy else self._call(doing, reason)
        if silent is None:
            return self._without_store(named), False
        states = {rank: self._state_of(rank) for rank in silent}
        gone = {rank: state for rank, state in states.items() if state.is_gone}
        who = "; ".join(f"rank {rank} {state.words}" for rank, state in (gone or states).items())
        if states and not gone and (num_steps := self.progress.num_steps) is not None:
            who += f" (after {num_steps} synchronized backwards, while rank {self._rank} is in number {num_steps + 1})"
        return (who, False) if who else (f"every rank still answers{self._elsewhere(doing)}", True)

    def _elsewhere(self, doing: str) -> str:
        for rank in range(self._num_ranks):
            with contextlib.suppress(RuntimeError):
                words = (self._store.get(f"here/{rank}") or b"").decode()
                if words not in ("", doing):
                    return f", but rank {rank} was {words}"
        return ""

    def _without_store(self, named: int | None) -> str:
        """Describe the failure when the store does not answer: from the collective, and from the kernel."""
        states = {rank: _look_up(card) for rank, card in sorted(self._cards.items())}
        if named in states:
            return f"rank {named} {states[named].words}"
        gone = {rank: state for rank, state in states.items() if state.is_gone}
        if not gone:
            host = "its host, usually rank 0," if self._rank else "the process that hosts it"
            return f"the job's store does not answer, so {host} is gone or out of reach"
        who = "; ".join(f"rank {rank} {state.words}" for rank, state in gone.items())
        first = "" if len(gone) == 1 else "; their outputs say which was first"
        return f"{who} (the job's store does not answer either){first}"

    def _call(self, doing: str, reason: str | None) -> list[int] | None:
        """Ask all ranks to answer. Return those that do not; None when the store does not answer."""
        deadline_s = time.monotonic() + GRACE_S
        try:
            self._store.set(f"here/{self._rank}", doing)
            if reason is not None:
                self._store.set("failure_detection", reason)
            others = (rank for rank in range(self._num_ranks) if rank != self._rank)
            return [rank for rank in others if not self._answers(rank, deadline_s)]
        except RuntimeError:
            return None

    def _answers(self, rank: int, deadline_s: float) -> bool:
        """Return whether a rank answers in time. Ranks that never will are not waited for."""
        key, look_s = f"here/{rank}", _FIRST_LOOK_S
        while self._store.get(key) is None and not self._has_ended(rank):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
            # Not by torch's `wait`, which writes two lines to stderr each time that nothing came.
            time.sleep(min(look_s, left_s))
            look_s = min(2 * look_s, _LAST_LOOK_S)
        return self._store.get(key) is not None  # it may have answered, and then ended

    def some_have_ended(self) -> bool:
        """Return whether a rank has left, or its process is of this host and dead, as far as the store answers."""
        others = [rank for rank in range(self._num_ranks) if rank != self._rank]
        if not self._has_store:
            return False
        # A process that is killed closes its connections a moment before it is dead.
        for pause_s in (_FIRST_LOOK_S, 2 * _FIRST_LOOK_S, 0.0):
            with contextlib.suppress(RuntimeError):
                if _StoreQuery(self._store, f"who/{self._rank}").answer(SLICE_S) is None:
                    return False
                if any(map(self._has_ended, others)):
                    return True
            time.sleep(pause_s)
        return False

    def _has_ended(self, rank: int) -> bool:
        card = self._card(rank)
        return card is not None and (card.state() == GONE or self._store.get(f"left/{rank}") is not None)

    def _state_of(self, rank: int) -> _State:
        try:
            card = self._card(rank)
            if card is None:
                return _State(f"has not got as far as {self._first_act}", is_gone=False)
            left = self._store.get(f"left/{rank}")
            if left is not None:
                return _State(f"{card} {left.decode()}", is_gone=True)
        except RuntimeError:
            return _State("does not answer", is_gone=False)
        return _look_up(card)

    def _card(self, rank: int) -> ProcessIdentity | None:
        if rank not in self._cards and (words := self._store.get(f"who/{rank}")) is not None:
            self._cards[rank] = ProcessIdentity.from_words(words)
        return self._cards.get(rank)


def _forget_oldest(leaves: weakref.finalize[[SealedStore, int, _Progress], ProcessGroup]) -> None:
    """Keep the answer of a dropped object, because other ranks may still wait for it. Forget the oldest answers."""
    _dropped.append(leaves)
    if len(_dropped) > _MOST_DROPPED:
        _dropped.popleft().detach()


def _say_left(store: SealedStore, rank: int, progress: _Progress) -> None:
    """Tell ranks that may still wait that this one has left, and how."""
    if progress.has_left or progress.is_store_busy or _StoreQuery.some_hangs():
        return
    error: BaseException | None = getattr(sys, "last_value", None)
    after = "" if progress.num_steps is None else f" after step {progress.num_steps}"
    if error is not None:
        words = f"left{after} with {type(error).__name__}, see its output"
    else:
        words = (
            f"left{after}: its program ended, or destroyed the group, while others went on. Where ranks have different "
            "numbers of batches use `with model.join():`"
        )
    with contextlib.suppress(RuntimeError):  # the store went first
        store.set(f"left/{rank}", words)


class _StoreQuery(threading.Thread):
    """Asks the store for a key; on a thread, because a store behind a cut network never answers."""

    _all: ClassVar[weakref.WeakSet[_StoreQuery]] = weakref.WeakSet()

    @classmethod
    def some_hangs(cls) -> bool:
        """Return whether any has no answer: it holds its store's lock, and other queries of that store wait as long."""
        for query in list(cls._all):
            query.join(_FIRST_LOOK_S * 10)
        return any(query.is_alive() for query in list(cls._all))

    def __init__(self, store: SealedStore, key: str) -> None:
        super().__init__(name="paceline-failure-detection", daemon=True)
        self._all.add(self)
        self._store = store
        self._key = key
        self._answer: bytes | None = None
        self._error: RuntimeError | None = None
        self.start()
        end_before_exit(self, _StoreQuery._end)

    def run(self) -> None:
        try:
            self._answer = self._store.get(self._key)
        except RuntimeError as error:
            self._error = error

    def _end(self, patience_s: float) -> None:
        """Wait for the answer, or end the connection: a thread that came back later would abort the process."""
        self.join(patience_s)
        if self.is_alive() and (port := self._store.port) is not None:
            connections.shut(connections.to_port(port), spared=frozenset())
            self.join(GRACE_S)

    def answer(self, patience_s: float) -> bytes | None:
        """Return the value; None if there is none, and while there is no answer."""
        self.join(patience_s)
        if self._error is not None:
            raise self._error
        return None if self.is_alive() else self._answer


@dataclass(frozen=True)
class _State:
    words: str
    is_gone: bool


def _look_up(card: ProcessIdentity) -> _State:
    state = card.state()
    if state == GONE:
        return _State(f"{card} has died", is_gone=True)
    if is_stopped(state):
        return _State(f"{card} is stopped", is_gone=True)
    if state == UNKNOWN:
        return _State(f"{card} does not answer", is_gone=False)
    return _State(f"{card} is running but does not answer", is_gone=False)
