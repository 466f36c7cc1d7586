"""A rendezvous: ranks wait for each other in a store, before they have a group; errors name those that are missing.

Rules
1. A rank writes its identity before anything else, so that ranks that wait for it can look whether it still exists.
2. A rank that gives up writes why; the others raise the same, instead of blaming it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from paceline.comm.sealed_store import SealedStore
from paceline.errors import ConfigurationError, PeerLostError
from paceline.host.processes import GONE, UNKNOWN, ProcessIdentity, is_stopped

SLICE_S = 0.5  # between two looks at those who are missing
_SCOPE = "rendezvous"
_PROCESS, _FAILED = "process", "failed"
_NEXT = "`paceline explain when it lost others` says more."


def announce(store: dist.Store, rank: int) -> None:
    """Write the identity of this rank, before anything that takes long."""
    SealedStore(store, _SCOPE).set(f"{_PROCESS}/{rank}", ProcessIdentity.of_this_process().words)


class Rendezvous:
    """One rank's part in a rendezvous, in a store of its own.

    A rank waits `timeout` for the others; `doing` says in messages what for. In `known`, another store, every rank may
    have announced itself before, as the same rank.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        num_ranks: int,
        timeout: timedelta,
        doing: str,
        known: dist.Store | None = None,
    ) -> None:
        self._store = SealedStore(store, _SCOPE)
        self.rank = rank
        self._num_ranks = num_ranks
        self._timeout = timeout
        self._doing = doing
        self._places = [self._store] if known is None else [self._store, SealedStore(known, _SCOPE)]
        self._cards: dict[int, ProcessIdentity] = {}
        announce(store, rank)

    def publish(self, topic: str, words: str) -> None:
        """Write this value where all other ranks read it. Local."""
        self._store.set(f"{topic}/{self.rank}", words)

    def decline(self, why: str) -> None:
        """Publish why this rank does not come, so that the other ranks do not wait for it. Local."""
        self._store.set(_FAILED, f"{self.rank} rank {self.rank} cannot come ({why})")

    def collect(self, topic: str) -> list[bytes]:
        """Return what every rank has published. Blocks until all have; PeerLostError if one does not in time."""
        try:
            return self._collect(topic)
        except PeerLostError:
            raise
        except RuntimeError as error:
            raise PeerLostError(
                f"rank {self.rank} was {self._doing} when the job's store did not answer any more: the process that "
                f"hosts it, the launcher or rank 0, has ended. Look at its output. {_NEXT} The store said: {error}"
            ) from error

    def _collect(self, topic: str) -> list[bytes]:
        until_s = time.monotonic() + self._timeout.total_seconds()
        words: list[bytes] = []
        for rank in range(self._num_ranks):
            key = f"{topic}/{rank}"
            found = self._store.get(key)
            while found is None:
                left_s = until_s - time.monotonic()
                # An error says that the slice has passed; or the store is gone, and then `get` says so.
                with contextlib.suppress(RuntimeError):
                    found = self._store.wait(key, timedelta(seconds=max(min(SLICE_S, left_s), 0.01)))
                if found is None:
                    is_late = time.monotonic() >= until_s  # now: what comes while we look is not missing
                    rest = range(rank, self._num_ranks)
                    missing = [other for other in rest if self._store.get(f"{topic}/{other}") is None]
                    self._raise_if_lost(topic, missing, is_late)
                    found = self._store.get(key)
            words.append(found)
        return words

    def _raise_if_lost(self, topic: str, missing: Sequence[int], is_late: bool) -> None:
        failed = self._store.get(_FAILED)
        if failed is not None:
            lost, words = failed.decode().split(" ", 1)
            self._fail(int(lost), words)
        for rank in missing:
            card = self._card(rank)
            if card is None or card.state() != GONE:
                continue
            has_come = self._store.get(f"{topic}/{rank}") is not None  # since, and ended
            if not has_come:
                self._fail(rank, f"rank {rank} {card} has died. Look at its output first")
        if is_late and missing:
            stories = "; ".join(f"rank {rank} {self._story(rank)}" for rank in missing)
            within = f"in {self._timeout.total_seconds():g} s"
            self._fail(missing[0], f"{stories}, {within}. Look at the output of each")

    def _fail(self, lost: int, words: str) -> None:
        self._store.set(_FAILED, f"{lost} {words}")
        raise PeerLostError(f"rank {self.rank} was {self._doing} when it lost others: {words}. {_NEXT}", lost)

    def _story(self, rank: int) -> str:
        card = self._card(rank)
        if card is None:
            return "did not come: nothing was heard of it, so it has ended before or never started"
        state = card.state()
        if state == UNKNOWN:
            return f"{card} did not come"
        return f"{card} did not come: it is {'stopped' if is_stopped(state) else 'in another part of the program'}"

    def _card(self, rank: int) -> ProcessIdentity | None:
        for place in self._places:
            if rank not in self._cards and (words := place.get(f"{_PROCESS}/{rank}")) is not None:
                self._cards[rank] = ProcessIdentity.from_words(words)
        return self._cards.get(rank)


def store_of_job(who: str) -> dist.Store:
    """Return the job's store, for connections that `who` makes; raises ConfigurationError if there is none."""
    try:
        return dist.distributed_c10d._get_default_store()
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{who} makes connections of its own and finds the other ranks by the job's store, but this job has none "
            "(it was launched by MPI?). Call init_process_group with a store or an init_method, as torchrun does."
        ) from error
