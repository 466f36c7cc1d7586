"""Hierarchical all-reduce: reduce inside each host, all-reduce across hosts, distribute inside each host.

The message is cut into as many shards as the smallest host has ranks. On every host the ranks with the first local
indices own one shard each. First an owner folds its shard from all ranks of the host, in one round. Then it all-reduces
the shard with the same shard's owners on the other hosts, by any flat all-reduce. All shards go at once, so every owner
of a host uses its link. In the last round the owner gives the result to the ranks of its host.

Hosts of unequal size: ranks beyond the smallest host's number own nothing; they only give and receive. A host's
link is shared by its ranks, so more owners would not make it faster.

Bytes over a host's link, H hosts, n the message, with a bandwidth-optimal algorithm across: 2(H-1)/H n in each
direction, the least possible. A flat ring with ranks ordered by host sends 2(P-1)/P n; any other order more.

Source: Goyal et al. 2017, section 4.1, where one rank a host communicates; here all owners do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from paceline.schedules.schedule import Round, Rounds, Schedule, Transfer, mirror, place, side_by_side
from paceline.schedules.topology import Topology


def hand_out(members: tuple[int, ...], num_shards: int, shard_blocks: int) -> Round:
    """Let each owner send its shard to all other ranks of the host."""
    return tuple(
        Transfer(
            members[shard],
            members[(shard + step) % len(members)],
            shard * shard_blocks,
            (shard + 1) * shard_blocks,
            fold=False,
        )
        for step in range(1, len(members))
        for shard in range(num_shards)
    )


def num_shards(topology: Topology) -> int:
    """Return how many ranks of each host own a shard."""
    return min(map(len, topology.ranks_of_host))


def _between(topology: Topology, flat: Schedule) -> Rounds:
    """Return the rounds between hosts: the owners of shard s, one on each host, play the ranks of `flat`."""
    return side_by_side(
        place(flat.rounds, [host[shard] for host in topology.ranks_of_host], shard * flat.num_blocks)
        for shard in range(num_shards(topology))
    )


@lru_cache(maxsize=32)
def all_reduce(topology: Topology, name: str, across: Callable[[int], Schedule]) -> Schedule:
    """Return the schedule: two rounds more than `across` takes for as many ranks as there are hosts."""
    flat = across(topology.num_hosts)
    shards = num_shards(topology)
    distribute: Rounds = side_by_side(
        (hand_out(host, shards, flat.num_blocks),) for host in topology.ranks_of_host if len(host) > 1
    )
    rounds = mirror(distribute) + _between(topology, flat) + distribute
    return Schedule(name, topology.num_ranks, shards * flat.num_blocks, rounds)
