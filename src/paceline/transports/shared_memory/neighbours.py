"""Finding the ranks that can share this host's memory, and mapping each other's arenas.

Equal host names prove nothing: containers share a name or a kernel without sharing memory. Ranks could be neighbours if
they share the boot of a kernel and the network and process namespaces. Those open each other's memfd through /proc, and
check the nonce that its owner put into the store. Hosts emulated as network namespaces on one machine stay apart.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline import version
from paceline.comm.rendezvous import Rendezvous
from paceline.errors import ConfigurationError
from paceline.host.processes import whereabouts
from paceline.transports.shared_memory import futex
from paceline.transports.shared_memory.arena import (
    NONCE_BYTES,
    SIZE_BYTES,
    Arena,
    Budget,
    Status,
    least_bytes,
    size_within,
)

SWITCH = "PACELINE_SHARED_MEMORY"
"""Environment variable. "0": share with no rank; any other value: only with ranks that have the same value."""


@dataclass(frozen=True)
class Neighbour:
    """One rank of this host, which may be this rank itself."""

    rank: int
    pid: int
    arena: Arena
    status: Status


@dataclass(frozen=True)
class Host:
    """The ranks of this host, as this rank sees them."""

    neighbours: tuple[Neighbour, ...]  # by rank, ourselves among them
    index: int  # this rank's place among them
    # the ranks of every host, in the order of their first ranks; the same on every rank
    hosts: tuple[tuple[int, ...], ...]
    # why ranks that seem to share a machine do not share memory; "" where there is nothing to explain
    remark: str = ""

    @property
    def me(self) -> Neighbour:
        return self.neighbours[self.index]

    @property
    def num_ranks(self) -> int:
        return len(self.neighbours)

    @property
    def is_only_one(self) -> bool:
        """Return whether all ranks of the group are on this host; the same on every rank."""
        return len(self.hosts) == 1


def join_host(
    store: dist.Store,
    rank: int,
    num_ranks: int,
    timeout: timedelta | None = None,
    known: dist.Store | None = None,
) -> Host:
    """Map the arenas of this host's ranks. Collective over the group; blocks until all have come. Nothing is on disk.

    `store` belongs to this group alone. In `known` the ranks may have announced themselves before, by the same numbers.
    Raises PeerLostError if a rank did not come, ConfigurationError, on every rank, for different versions of Paceline.
    """
    doing = f"joining a process group of {num_ranks} ranks"
    patience: Any = store
    rendezvous = Rendezvous(store, rank, num_ranks, timeout or patience.timeout, doing, known)
    card, fd = _card()
    try:
        rendezvous.publish("card", json.dumps(card))
        cards = [json.loads(words) for words in rendezvous.collect("card")]
        versions = [card.get("version", "of a version that does not say") for card in cards]
        if (other_version := version.difference(versions)) is not None:
            raise ConfigurationError(other_version)
        mapped, why = _map_arenas(rank, cards)
        rendezvous.publish("mapped", json.dumps({"ranks": sorted(mapped), "why": why}))
        answers = [json.loads(words) for words in rendezvous.collect("mapped")]
    finally:
        if fd is not None:
            os.close(fd)  # all have opened it
    views = [(set(answer["ranks"]), answer["why"]) for answer in answers]
    hosts, remark = _agree([card["where"] for card in cards], views)
    mine = next(ranks for ranks in hosts if rank in ranks)
    if mine == (rank,):
        mapped = {rank: _neighbour(rank, os.getpid(), Arena(None, least_bytes(1), SIZE_BYTES))}
    neighbours = tuple(mapped[other] for other in mine)
    return Host(neighbours, mine.index(rank), hosts, remark)


def _neighbour(rank: int, pid: int, arena: Arena) -> Neighbour:
    return Neighbour(rank, pid, arena, Status(arena))


def _card() -> tuple[dict[str, Any], int | None]:
    """Make a memfd with the nonce. Return what other ranks need in order to map it, and its file descriptor."""
    nonce, where, budget, fd = secrets.token_bytes(NONCE_BYTES), _where(), Budget.of_this_process(), None
    if where:
        try:
            fd = Arena.create()
            os.pwrite(fd, nonce, 0)
        except OSError:  # too many open files, or files must have no size at all
            budget = Budget(0, 0)
    card = {"where": where, "pid": os.getpid(), "fd": fd, "nonce": nonce.hex(), "budget": asdict(budget)}
    return {**card, "version": version.__version__}, fd


def _where() -> str:
    """Return a text that is equal for two processes that may share memory; empty if this process cannot."""
    setting = os.environ.get(SWITCH, "")
    if not futex.IS_AVAILABLE or setting == "0":
        return ""
    try:
        return f"{whereabouts('net', 'pid')}/{setting}"
    except OSError:
        return ""


def _map_arenas(rank: int, cards: Sequence[dict[str, Any]]) -> tuple[dict[int, Neighbour], str]:
    """Map the arenas of the ranks that may share memory with this one. Return them, and why others were left out."""
    where = cards[rank]["where"]
    here = {other: card for other, card in enumerate(cards) if where and card["where"] == where}
    if len(here) <= 1:
        return {}, ""
    budgets = {other: Budget(**card["budget"]) for other, card in here.items()}
    size_bytes = size_within(list(budgets.values()))
    if not size_bytes:
        poorest = min(budgets, key=lambda other: min(astuple(budgets[other])))
        return (
            {},
            f"rank {poorest} has too little address space or file size left, or too few open files (ulimit -v, -f, -n)",
        )
    mapped: dict[int, Neighbour] = {}
    why = ""
    for other, card in here.items():
        refused = f"rank {rank} may not map memory of rank {other} (another user, or ptrace is restricted)"
        try:
            fd = os.open(f"/proc/{int(card['pid'])}/fd/{int(card['fd'])}", os.O_RDWR)
        except OSError:
            why = why or refused
            continue
        if os.pread(fd, NONCE_BYTES, 0) != bytes.fromhex(card["nonce"]):
            os.close(fd)
            why = why or refused
            continue
        try:
            mapped[other] = _neighbour(other, int(card["pid"]), Arena(fd, size_bytes, SIZE_BYTES))
        except OSError as error:
            return {}, f"rank {rank} could not map {size_bytes:,} bytes ({error.strerror})"
    return mapped, why


def _agree(
    wheres: Sequence[str], views: Sequence[tuple[set[int], str]]
) -> tuple[tuple[tuple[int, ...], ...], str]:
    """Group the ranks by host; where one could not map another, each rank there is a host of its own."""
    places: dict[str, list[int]] = {}
    for rank, where in enumerate(wheres):
        places.setdefault(where or f"alone/{rank}", []).append(rank)
    hosts: list[tuple[int, ...]] = []
    remark = ""
    for ranks in places.values():
        missing = [rank for rank in ranks if not views[rank][0] >= set(ranks)]
        if len(ranks) > 1 and missing:
            remark = f"ranks {ranks} run under one kernel, but {views[missing[0]][1]}, so they talk over the network"
            hosts.extend((rank,) for rank in ranks)
        else:
            hosts.append(tuple(ranks))
    return tuple(sorted(hosts)), remark
