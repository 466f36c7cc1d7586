"""Finding the ranks that can share this host's memory, and mapping each other's arenas.

Equal host names prove nothing: containers share a name or a kernel without sharing memory. So ranks that could be
neighbours (same boot of the same kernel, same network and process namespaces) open each other's memfd through /proc,
and check the nonce that its owner put into the store. Hosts emulated as network namespaces on one machine stay apart.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from paceline.host.processes import whereabouts
from paceline.transports.shared_memory import futex
from paceline.transports.shared_memory.arena import Arena
from paceline.transports.shared_memory.status import NONCE_BYTES, SIZE_BYTES, Status

SWITCH = "PACELINE_SHARED_MEMORY"
"""Environment variable. "0": share with nobody; any other value: only with ranks that have the same value."""


@dataclass(frozen=True)
class Neighbour:
    """One rank of this host; also ourselves."""

    rank: int
    pid: int
    arena: Arena
    status: Status


@dataclass(frozen=True)
class Host:
    """The ranks of this host, as this rank sees them.

    Attributes:
        neighbours: By rank, ourselves among them.
        index: Our place among them.
        hosts: The ranks of every host, in the order of their first ranks; the same on every rank.
        remark: Why ranks that seem to share a machine do not share memory; "" where there is nothing to explain.
    """

    neighbours: tuple[Neighbour, ...]
    index: int
    hosts: tuple[tuple[int, ...], ...]
    remark: str = ""

    @property
    def me(self) -> Neighbour:
        return self.neighbours[self.index]

    @property
    def num_ranks(self) -> int:
        return len(self.neighbours)


def join_host(store: dist.Store, rank: int, num_ranks: int) -> Host:
    """Map the arenas of this host's ranks.

    Args:
        store: Of this group alone; its timeout bounds the wait for the others.
        rank: In this group.
        num_ranks: Of this group.

    Contract:
        Collective over the group. Blocks: until every rank has come here.
        Nothing is left on disk: there never was anything.
    """
    fd = Arena.create()
    lent = os.dup(fd)  # for the neighbours to open; closed once all have
    try:
        arena = Arena(fd, SIZE_BYTES)
        me = Neighbour(rank, os.getpid(), arena, Status(arena))
        nonce = secrets.token_bytes(NONCE_BYTES)
        me.status.set_nonce(nonce)
        _publish(store, "card", rank, {"where": _where(), "pid": me.pid, "fd": lent, "nonce": nonce.hex()})
        cards = _collect(store, "card", num_ranks)
        mapped = _map_neighbours(me, cards)
        _publish(store, "mapped", rank, {"ranks": sorted(mapped)})
        views = [set(answer["ranks"]) for answer in _collect(store, "mapped", num_ranks)]
    finally:
        os.close(lent)
    hosts, remark = _agree([card["where"] for card in cards], views)
    mine = next(ranks for ranks in hosts if rank in ranks)
    neighbours = tuple(mapped[other] for other in mine)
    return Host(neighbours, mine.index(rank), hosts, remark)


def _where() -> str:
    """What two processes must have in common before they try to share memory; empty if this one cannot."""
    setting = os.environ.get(SWITCH, "")
    if not futex.IS_AVAILABLE or setting == "0":
        return ""
    try:
        return f"{whereabouts('net', 'pid')}/{setting}"
    except OSError:
        return ""


def _map_neighbours(me: Neighbour, cards: Sequence[dict[str, Any]]) -> dict[int, Neighbour]:
    """Every rank whose memory this one can map, by rank; itself always."""
    mapped = {me.rank: me}
    where = cards[me.rank]["where"]
    for rank, card in enumerate(cards):
        if rank == me.rank or not where or card["where"] != where:
            continue
        try:
            arena = Arena(os.open(f"/proc/{int(card['pid'])}/fd/{int(card['fd'])}", os.O_RDWR), SIZE_BYTES)
        except (OSError, ValueError):
            continue
        status = Status(arena)
        if status.nonce == bytes.fromhex(card["nonce"]):
            mapped[rank] = Neighbour(rank, int(card["pid"]), arena, status)
    return mapped


def _agree(wheres: Sequence[str], views: Sequence[set[int]]) -> tuple[tuple[tuple[int, ...], ...], str]:
    """Group the ranks by host; where one could not map another, each rank there is a host of its own."""
    places: dict[str, list[int]] = {}
    for rank, where in enumerate(wheres):
        places.setdefault(where or f"alone/{rank}", []).append(rank)
    hosts: list[tuple[int, ...]] = []
    remark = ""
    for ranks in places.values():
        missing = [(a, b) for a in ranks for b in ranks if b not in views[a]]
        if missing:
            a, b = missing[0]
            remark = (
                f"ranks {ranks} run under one kernel, but rank {a} may not map memory of rank {b} (another user, "
                "or ptrace is restricted), so they talk over the network"
            )
            hosts.extend((rank,) for rank in ranks)
        else:
            hosts.append(tuple(ranks))
    return tuple(sorted(hosts)), remark


def _publish(store: dist.Store, topic: str, rank: int, facts: dict[str, Any]) -> None:
    store.set(f"{topic}/{rank}", json.dumps(facts))


def _collect(store: dist.Store, topic: str, num_ranks: int) -> list[dict[str, Any]]:
    return [json.loads(store.get(f"{topic}/{rank}")) for rank in range(num_ranks)]
