"""Handles by which ranks name each other when a group gets other members (c10d's `reconfigure`, in torch from 2.14).

A handle is words: the rank's identity, the number of changes before, its rank, and where its store listens. The caller
that collects the handles and hands them to all decides on the members; a list says in which order.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist

from paceline.errors import ConfigurationError

_NAME = "paceline"


@dataclass(frozen=True)
class Handle:
    """The handle of one rank, for one change of the group; the change makes another."""

    rank: int  # in the group as it is; of a set of handles it decides the order
    who: str  # no other group object has it
    changes: int  # how often this one was changed
    # where the store listens in which it can be met, as `host:port`; empty for a store of another kind
    where: str

    @classmethod
    def of(cls, store: dist.Store, rank: int) -> Handle:
        """Return the first handle of a rank in a group with this store."""
        server = innermost(store)
        where = f"{server.host}:{server.port}" if isinstance(server, dist.TCPStore) else ""
        return cls(rank, secrets.token_hex(8), 0, where)

    @classmethod
    def parse(cls, words: str) -> Handle:
        """Read what `str` gave. Raises ConfigurationError for anything else."""
        with contextlib.suppress(ValueError, AttributeError):
            name, rank, who, changes, where = words.split("/")
            if name == _NAME:
                return cls(int(rank), who, int(changes), where)
        raise ConfigurationError(
            f"{words!r} is no handle of the backend paceline. Pass what get_reconfigure_handle() returned on each rank."
        )

    def __str__(self) -> str:
        return f"{_NAME}/{self.rank:06}/{self.who}/{self.changes}/{self.where}"

    def after(self, rank: int) -> Handle:
        """Return the next handle, in a group where it has this rank."""
        return replace(self, rank=rank, changes=self.changes + 1)


def in_order(given: Collection[str], own: Handle) -> list[Handle]:
    """Return the members by new rank. A list gives the order, a set keeps the old ranks' order.

    Raises ConfigurationError if that is not possible.
    """
    handles = [Handle.parse(words) for words in (given if isinstance(given, list) else sorted(given))]
    if len({handle.who for handle in handles}) < len(handles):
        raise ConfigurationError(f"of {len(handles)} handles some are of the same rank. Pass one of each.")
    if own not in handles:
        raise ConfigurationError(
            f"this rank's handle {str(own)!r} is not among the {len(handles)} that were given. Collect the handles "
            "before each change: every change makes others."
        )
    return handles


def store_of(
    handles: list[Handle], own: Handle, store: dist.Store, uuid: int, timeout: timedelta
) -> dist.Store:
    """Return the store in which the members (`handles`, in order) meet: the first one's, with a prefix for `uuid`.

    Raises ConfigurationError if other members cannot reach it because it is not a TCPStore.
    """
    where = handles[0].where
    base = innermost(store)
    if where != own.where:
        host, _, port = where.rpartition(":")
        if not host:
            raise ConfigurationError(
                "the members' stores differ, and the first member's is not a TCPStore, so the others cannot reach it."
            )
        base = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    members = hashlib.sha256(" ".join(map(str, handles)).encode()).hexdigest()[:16]
    return dist.PrefixStore(f"reconfigured/{uuid}/{members}", base)


def innermost(store: dist.Store) -> dist.Store:
    """Return the store that all prefixes are added to."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store
