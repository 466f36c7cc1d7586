"""The rounds of all-reduce algorithms as arrays, for thousands of ranks: who sends which fraction of the message.

A `Schedule` names the blocks of every message, and checks them: at 4,096 ranks a ring would be 33 million messages.
What a round costs depends only on who sends how much to whom, and most rounds of an algorithm are alike. For the
algorithms whose rounds have a closed form this file builds them directly; a test holds them to the schedules, byte by
byte. For others (halving-doubling over a number of ranks that is no power of two) it asks the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigurationError
from paceline.schedules.algorithms import SCHEDULES
from paceline.schedules.topology import Topology

Ranks = NDArray[np.int64]
Ratios = NDArray[np.float64]
FLAT = ("ring", "halving_doubling", "recursive_doubling", "circulant", "direct")
ALL_REDUCES = (*FLAT, *(f"hierarchical_{name}" for name in FLAT))
_MOST_DIRECT = 256  # beyond, "direct" is P^2 messages that no network likes
_MOST_SCHEDULED = 600  # building a schedule for more takes minutes
_HIERARCHICAL = "hierarchical_"


@dataclass(frozen=True, eq=False)
class Pattern:
    """Rounds that are alike."""

    sources: Ranks  # rank that sends, one a message
    targets: Ranks  # rank that receives
    ratios: Ratios  # fraction of the whole message that travels
    repeat: int  # how many such rounds follow each other
    folds: bool  # whether what arrives is added


@lru_cache(maxsize=128)
def patterns(algorithm: str, topology: Topology) -> tuple[Pattern, ...]:
    """Return the rounds of one of ALL_REDUCES, in order. Raises ConfigurationError if this topology has no such one."""
    if not is_possible(algorithm, topology):
        raise ConfigurationError(
            f"no all-reduce {algorithm!r} over {topology}; there are {', '.join(candidates(topology))}."
        )
    if topology.num_ranks == 1:
        return ()
    if not algorithm.startswith(_HIERARCHICAL):
        return tuple(_flat(algorithm, np.arange(topology.num_ranks), 1.0))
    return tuple(_in_hosts(algorithm.removeprefix(_HIERARCHICAL), topology))


def is_possible(algorithm: str, topology: Topology) -> bool:
    """Return whether `patterns` can build it."""
    if algorithm not in ALL_REDUCES:
        return False
    if not SCHEDULES[algorithm].fits(topology):
        return False
    hierarchical = algorithm.startswith(_HIERARCHICAL)
    size = topology.num_hosts if hierarchical else topology.num_ranks
    flat = algorithm.removeprefix(_HIERARCHICAL)
    if flat == "direct":
        return size <= _MOST_DIRECT
    return flat != "halving_doubling" or _is_power(size) or size <= _MOST_SCHEDULED


def candidates(topology: Topology) -> tuple[str, ...]:
    """Return all algorithms that are possible here."""
    return tuple(name for name in ALL_REDUCES if is_possible(name, topology))


def _flat(name: str, ranks: Ranks, ratio: float) -> Iterator[Pattern]:
    """Yield the rounds of a flat algorithm among `ranks`, for `ratio` of the message."""
    size = len(ranks)
    if size == 1:
        return
    if name == "ring":
        ahead, sent = np.roll(ranks, -1), np.full(size, ratio / size)
        yield Pattern(ahead, ranks, sent, size - 1, True)  # the mirror image of the gather
        yield Pattern(ranks, ahead, sent, size - 1, False)
    elif name == "direct":
        source, step = np.meshgrid(np.arange(size), np.arange(1, size))
        sent = np.full(source.size, ratio / size)
        for folds in (True, False):
            yield Pattern(ranks[source.ravel()], ranks[((source + step) % size).ravel()], sent, 1, folds)
    elif name == "circulant":
        yield from _circulant(ranks, ratio)
    elif name == "halving_doubling" and _is_power(size):
        halvings = [(1 << t, ratio / (2 << t)) for t in range(size.bit_length() - 1)]
        for distance, part in halvings:
            yield _exchange(ranks, distance, part, folds=True)
        for distance, part in reversed(halvings):
            yield _exchange(ranks, distance, part, folds=False)
    elif name == "recursive_doubling":
        yield from _recursive_doubling(ranks, ratio)
    else:
        yield from _scheduled(name, ranks, ratio)


def _circulant(ranks: Ranks, ratio: float) -> Iterator[Pattern]:
    size, held, rounds = len(ranks), 1, []
    while held < size:
        sent = min(held, size - held)
        rounds.append((held, ratio * sent / size))
        held += sent
    for distance, part in reversed(rounds):  # the mirror image of the gather
        yield Pattern(np.roll(ranks, distance), ranks, np.full(size, part), 1, True)
    for distance, part in rounds:
        yield Pattern(ranks, np.roll(ranks, distance), np.full(size, part), 1, False)


def _recursive_doubling(ranks: Ranks, ratio: float) -> Iterator[Pattern]:
    core = 1 << len(ranks).bit_length() - 1
    beyond = ranks[core:]
    whole = np.full(len(beyond), ratio)
    if len(beyond):
        yield Pattern(beyond, ranks[: len(beyond)], whole, 1, True)
    for t in range(core.bit_length() - 1):
        yield _exchange(ranks[:core], 1 << t, ratio, folds=True)
    if len(beyond):
        yield Pattern(ranks[: len(beyond)], beyond, whole, 1, False)


def _exchange(ranks: Ranks, distance: int, part: float, *, folds: bool) -> Pattern:
    """Return a round in which partners whose numbers differ in one bit exchange `part` of the message."""
    return Pattern(ranks, ranks[np.arange(len(ranks)) ^ distance], np.full(len(ranks), part), 1, folds)


def _scheduled(name: str, ranks: Ranks, ratio: float) -> Iterator[Pattern]:
    """Yield the rounds of the schedule of this name."""
    schedule = SCHEDULES[name].build(Topology.one_rank_a_host(len(ranks)))
    for round_ in schedule.rounds:
        sent = [ratio * (t.last - t.first) / schedule.num_blocks for t in round_]
        yield Pattern(
            ranks[[t.source for t in round_]],
            ranks[[t.target for t in round_]],
            np.array(sent),
            1,
            any(t.fold for t in round_),
        )


def _in_hosts(across: str, topology: Topology) -> Iterator[Pattern]:
    """Fold within each host, all-reduce a shard each across hosts, hand out within each host."""
    hosts = [np.array(ranks) for ranks in topology.ranks_of_host]
    shards = min(map(len, hosts))
    owners, others = [], []
    for host in hosts:
        owner, step = np.meshgrid(np.arange(shards), np.arange(1, len(host)))
        owners.append(host[owner.ravel()])
        others.append(host[((owner + step) % len(host)).ravel()])
    owner, other = np.concatenate(owners), np.concatenate(others)
    sent = np.full(len(owner), 1 / shards)
    yield Pattern(other, owner, sent, 1, True)
    teams = np.array([host[:shards] for host in hosts])  # teams[:, s]: the owners of shard s
    for pattern in _flat(across, np.arange(len(hosts)), 1 / shards):
        yield Pattern(
            teams[pattern.sources].ravel(),
            teams[pattern.targets].ravel(),
            np.repeat(pattern.ratios, shards),
            pattern.repeat,
            pattern.folds,
        )
    yield Pattern(owner, other, sent, 1, False)


def _is_power(size: int) -> bool:
    return size & (size - 1) == 0
