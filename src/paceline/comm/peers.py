"""Failure detection: waits for collectives, and when one fails says which ranks died, hang or cannot be reached.

A rank whose collective failed starts a *roll call*: it writes what it was doing into the job's store, and gives the
others a moment to do the same. A rank that waits for a collective polls the store for a roll call twice a second, so
that it answers, and fails, too. A rank that has not answered is looked up by its process id if it is on this host.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from paceline.comm.pending import Pending
from paceline.errors import PeerLostError
from paceline.host.exit import end_before_exit
from paceline.host.processes import GONE, UNKNOWN, is_stopped, state_of

SLICE_S = 0.5  # between two polls for a roll call
GRACE_S = 2.0  # for the others to answer

_GRADIENTS_ARE_UNDEFINED = (
    "The gradients of this step are undefined, the parameters are untouched. Look at the output of the rank "
    "named here first; restart from the last checkpoint (torchrun --max-restarts does that by itself)."
)
_num_named: dict[str, int] = {}


def next_name(process_group: ProcessGroup, is_collective: bool) -> str:
    """Return a name for what is being made: the same on every rank of the group, not used before.

    Args:
        process_group: Of the ranks that make it.
        is_collective: Whether all of them do so now; copies are counted apart, as a rank may make some by itself.
    """
    try:
        members = dist.get_process_group_ranks(process_group)
    except (KeyError, ValueError, RuntimeError):  # a group that is not registered
        members = list(range(process_group.size()))
    kind = f"{'wrapped' if is_collective else 'copied'}/{hashlib.sha256(repr(members).encode()).hexdigest()[:16]}"
    _num_named[kind] = _num_named.get(kind, 0) + 1
    return f"{kind}/{_num_named[kind]}"


class Peers:
    """The other ranks of a process group, for whoever waits for collectives with them.

    Args:
        process_group: Whom we wait for; its ranks are the ones named in messages.
        name: Identifies what waits (a module, an optimizer); the same on every rank.
        in_slices: Whether a wait may be cut into slices, to poll between them. Not for NCCL, where `wait` does not
            block the host.
        first_act: What a rank that was never heard of has not got as far as, for the message.
        consequence: What a failure means and what to do next, for the message.
    """

    def __init__(
        self,
        process_group: ProcessGroup,
        name: str,
        in_slices: bool,
        first_act: str = "wrapping its model",
        consequence: str = _GRADIENTS_ARE_UNDEFINED,
    ) -> None:
        self._rank = process_group.rank()
        self._in_slices = in_slices and process_group.size() > 1
        self._consequence = consequence
        self._roll_call = _RollCall(process_group, name, first_act)

    def wait(self, pending: Pending, doing: str) -> None:
        """Wait for a collective.

        Contract:
            Blocks: yes, at most for the process group's timeout and a roll call.

        Raises:
            PeerLostError: It failed, here or on another rank; names the ranks that are gone.
        """
        try:
            if self._in_slices:
                while not pending.wait(SLICE_S):
                    self._roll_call.raise_if_called()
            else:
                pending.wait()
        except RuntimeError as error:
            raise self.lost(error, doing) from error

    def lost(self, error: Exception, doing: str) -> PeerLostError:
        """Start a roll call, or answer one, and return the error that names the missing ranks.

        Args:
            error: Of the collective.
            doing: What this rank was doing.
        """
        who = self._roll_call.who_is_gone(doing)
        return PeerLostError(
            f"rank {self._rank} was {doing} when communication failed: {who}. {self._consequence} "
            f"The backend said: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        )


class _RollCall:
    """Asks the ranks of a group, through the job's store, which of them still answer."""

    def __init__(self, process_group: ProcessGroup, name: str, first_act: str) -> None:
        self._rank = process_group.rank()
        self._num_ranks = process_group.size()
        self._first_act = first_act
        self._has_store = True
        self._query: _StoreQuery | None = None
        try:
            default_store = dist.distributed_c10d._get_default_store()
            self._store: dist.Store = dist.PrefixStore(f"paceline/{name}", default_store)
            if self._num_ranks > 1:
                self._store.set(f"who/{self._rank}", f"{os.getpid()} {socket.gethostname()}")
        except (RuntimeError, TypeError, ValueError):  # MPI, or no default group: there is no store
            self._has_store, self._store = False, dist.HashStore()

    def raise_if_called(self) -> None:
        """Poll the store.

        Raises:
            RuntimeError: Another rank has started a roll call.
        """
        if self._has_store and (self._query is None or not self._query.is_alive()):
            self._query = _StoreQuery(self._store, "roll_call")
            if self._query.found(SLICE_S):
                raise RuntimeError("another rank has called the roll")

    def who_is_gone(self, doing: str) -> str:
        """Start a roll call, or answer it; returns in words which ranks are missing."""
        if not self._has_store:
            return "this job has no store in which to ask who still answers"
        # A query that hangs holds the store's lock, so nothing else can be asked.
        hangs = self._query is not None and self._query.is_alive()
        silent = None if hangs else self._call(doing)
        if silent is None:
            return "the job's store does not answer, so the rank that hosts it (usually 0) is gone or out of reach"
        states = {rank: self._state_of(rank) for rank in silent}
        gone = {rank: state for rank, state in states.items() if state.is_gone} or states
        who = "; ".join(f"rank {rank} {state.words}" for rank, state in gone.items())
        return who or "every rank still answers, so the network between them failed or they no longer agree"

    def _call(self, doing: str) -> list[int] | None:
        """Ranks that do not answer; None when the store does not."""
        deadline_s = time.monotonic() + GRACE_S
        try:
            self._store.set(f"here/{self._rank}", doing)
            self._store.set("roll_call", "1")
            others = (rank for rank in range(self._num_ranks) if rank != self._rank)
            return [rank for rank in others if not self._answers(rank, deadline_s)]
        except RuntimeError:
            return None

    def _answers(self, rank: int, deadline_s: float) -> bool:
        key = f"here/{rank}"
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return self._store.check([key])
        try:
            self._store.wait([key], timedelta(seconds=left_s))
        except RuntimeError:
            return self._store.check([key])
        return True

    def _state_of(self, rank: int) -> _State:
        try:
            if not self._store.check([f"who/{rank}"]):
                return _State(f"has not got as far as {self._first_act}", is_gone=False)
            pid, host = self._store.get(f"who/{rank}").decode().split(" ", 1)
        except RuntimeError:
            return _State("does not answer", is_gone=False)
        where = f"(process {pid} on {host})"
        if host != socket.gethostname():
            return _State(f"{where} does not answer", is_gone=False)
        return _look_up(int(pid), where)


class _StoreQuery(threading.Thread):
    """Asks the store whether it has a key; on a thread, because a store behind a cut network never answers."""

    def __init__(self, store: dist.Store, key: str) -> None:
        super().__init__(name="paceline-roll-call", daemon=True)
        self._store = store
        self._key = key
        self._answer = False
        self._error: RuntimeError | None = None
        self.start()
        end_before_exit(self, threading.Thread.join)

    def run(self) -> None:
        try:
            self._answer = self._store.check([self._key])
        except RuntimeError as error:
            self._error = error

    def found(self, patience_s: float) -> bool:
        """Whether the key is there; False also while there is no answer."""
        self.join(patience_s)
        if self._error is not None:
            raise self._error
        return self._answer and not self.is_alive()


@dataclass(frozen=True)
class _State:
    words: str
    is_gone: bool


def _look_up(pid: int, where: str) -> _State:
    """What the kernel says about a process of this host."""
    state = state_of(pid)
    if state == GONE:
        return _State(f"{where} has died", is_gone=True)
    if is_stopped(state):
        return _State(f"{where} is stopped", is_gone=True)
    if state == UNKNOWN:
        return _State(f"{where} does not answer", is_gone=False)
    return _State(f"{where} is running but does not answer", is_gone=False)


def describe(indices: Sequence[int], names: Sequence[str], limit: int = 5) -> str:
    """Name parameters in a message: the first few, and how many more."""
    named = ", ".join(names[index] for index in indices[:limit])
    return named + (f" and {len(indices) - limit} more" if len(indices) > limit else "")
