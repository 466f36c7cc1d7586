"""Waiting for the other ranks, and saying who it was when they do not come.

A rank that sees a collective fail calls the roll: it writes what it was doing into the job's store and gives the
others a moment to do the same. Those that wait for something look for a roll call twice a second, so they answer, and
leave, too. Whoever has not answered is looked up by process id when it lives on this host.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import ProcessGroup

from paceline.errors import PeerLostError
from paceline.reductions import Pending

SLICE_S = 0.5
GRACE_S = 2.0


_num_named: dict[str, int] = {}


def next_name(process_group: ProcessGroup, is_collective: bool) -> str:
    """A name for a module that is being wrapped: the same on every rank of the group, not used before.

    Args:
        process_group: Who wraps it.
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
    """The other ranks of one wrapped module.

    Args:
        process_group: Whom we wait for; its ranks are the ones named in messages.
        name: Identifies the module; the same on every rank.
        in_slices: Whether a wait may be cut into slices. Not for NCCL, where `wait` does not block the host.
    """

    def __init__(self, process_group: ProcessGroup, name: str, in_slices: bool) -> None:
        self._rank = process_group.rank()
        self._num_ranks = process_group.size()
        self._in_slices = in_slices and self._num_ranks > 1
        self._store: dist.Store | None = None
        self._question: _Question | None = None
        try:
            self._store = dist.PrefixStore(f"paceline/{name}", dist.distributed_c10d._get_default_store())
            if self._num_ranks > 1:
                self._store.set(f"who/{self._rank}", f"{os.getpid()} {socket.gethostname()}")
        except (RuntimeError, TypeError):  # MPI launches without a store: then no roll can be called
            self._store = None

    def wait(self, pending: Pending, doing: str) -> None:
        """Wait for a collective.

        Contract:
            Blocks: yes, at most for the process group's timeout and a roll call.

        Raises:
            PeerLostError: It failed, here or on another rank; names the ranks that are gone.
        """
        try:
            if not self._in_slices:
                pending.wait()
                return
            while not pending.wait(SLICE_S):
                self._raise_if_called()
        except RuntimeError as error:
            raise self.lost(error, doing) from error

    def _raise_if_called(self) -> None:
        if self._store is None:
            return
        if self._question is None or not self._question.is_alive():
            self._question = _Question(self._store, "roll_call")
            if self._question.is_answered_with_yes(SLICE_S):
                raise RuntimeError("another rank has called the roll")

    def lost(self, error: Exception, doing: str) -> PeerLostError:
        """Call the roll, or answer it, and put the result into words."""
        # A question that hangs holds the store's lock, so nothing else can be asked.
        hangs = self._question is not None and self._question.is_alive()
        silent = None if self._store is None or hangs else self._call_roll(self._store, doing)
        if self._store is None:
            who = "this job has no store in which to ask who still answers"
        elif silent is None:
            who = "the job's store does not answer, so the rank that hosts it (usually 0) is gone or out of reach"
        else:
            states = {rank: self._state_of(self._store, rank) for rank in silent}
            gone = {rank: state for rank, state in states.items() if state.is_gone} or states
            who = "; ".join(f"rank {rank} {state.words}" for rank, state in gone.items())
            who = (
                who or "every rank still answers, so the network between them failed or they no longer agree"
            )
        return PeerLostError(
            f"rank {self._rank} was {doing} when communication failed: {who}. "
            "The gradients of this step are undefined, the parameters are untouched. Look at the output of the rank "
            "named here first; restart from the last checkpoint (torchrun --max-restarts does that by itself). "
            f"The backend said: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        )

    def _call_roll(self, store: dist.Store, doing: str) -> list[int] | None:
        """Ranks that do not answer; None when the store does not."""
        deadline_s = time.monotonic() + GRACE_S
        try:
            store.set(f"here/{self._rank}", doing)
            store.set("roll_call", "1")
            others = (rank for rank in range(self._num_ranks) if rank != self._rank)
            return [rank for rank in others if not _answers(store, rank, deadline_s)]
        except RuntimeError:
            return None

    @staticmethod
    def _state_of(store: dist.Store, rank: int) -> _State:
        try:
            if not store.check([f"who/{rank}"]):
                return _State("has not got as far as wrapping its model", is_gone=False)
            pid, host = store.get(f"who/{rank}").decode().split(" ", 1)
        except RuntimeError:
            return _State("does not answer", is_gone=False)
        where = f"(process {pid} on {host})"
        if host != socket.gethostname():
            return _State(f"{where} does not answer", is_gone=False)
        return _look_up(int(pid), where)


def _answers(store: dist.Store, rank: int, deadline_s: float) -> bool:
    key = f"here/{rank}"
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        return store.check([key])
    try:
        store.wait([key], timedelta(seconds=left_s))
    except RuntimeError:
        return store.check([key])
    return True


class _Question(threading.Thread):
    """Asks the store whether it has a key; aside, because a store that a cut network hides never answers."""

    def __init__(self, store: dist.Store, key: str) -> None:
        super().__init__(name="paceline-roll-call", daemon=True)
        self._store = store
        self._key = key
        self._answer = False
        self._error: RuntimeError | None = None
        self.start()

    def run(self) -> None:
        try:
            self._answer = self._store.check([self._key])
        except RuntimeError as error:
            self._error = error

    def is_answered_with_yes(self, patience_s: float) -> bool:
        """Whether the key is there; False also while there is no answer."""
        self.join(patience_s)
        if self._error is not None:
            raise self._error
        return self._answer and not self.is_alive()


class _State:
    def __init__(self, words: str, is_gone: bool) -> None:
        self.words = words
        self.is_gone = is_gone


def _look_up(pid: int, where: str) -> _State:
    """What the kernel says about a process of this host."""
    try:
        code = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return _State(f"{where} has died", is_gone=True)
    except (OSError, IndexError):
        return _State(f"{where} does not answer", is_gone=False)
    if code in "ZX":
        return _State(f"{where} has died", is_gone=True)
    if code in "Tt":
        return _State(f"{where} is stopped", is_gone=True)
    return _State(f"{where} is running but does not answer", is_gone=False)


def describe(indices: Sequence[int], names: Sequence[str], limit: int = 5) -> str:
    """Name parameters in a message: the first few, and how many more."""
    named = ", ".join(names[index] for index in indices[:limit])
    return named + (f" and {len(indices) - limit} more" if len(indices) > limit else "")
