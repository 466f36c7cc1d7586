"""Hierarchical: reduce inside each host, all-reduce across hosts, distribute inside each host.

The message is cut into as many shards as the smallest host has ranks. On every host the ranks with the first local
indices own one shard each: they fold it from all ranks of the host (one round), all-reduce it with the owners of
the same shard on the other hosts (any all-reduce; all shards at once, so every owner of a host uses its link), and
give the result to the ranks of their host (one round).

Hosts of unequal size: ranks beyond the smallest host's number own nothing; they only give and receive. A host's
link is shared by its ranks, so more owners would not make it faster.

Bytes over a host's link, H hosts, n the message, with a bandwidth-optimal algorithm across: 2(H-1)/H n in each
direction, the least possible. A flat ring with ranks ordered by host sends 2(P-1)/P n; any other order more.

Source: Goyal et al. 2017, section 4.1, where one rank a host communicates; here all owners do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from paceline.schedules import halving_doubling, ring
from paceline.schedules.compose import Rounds, mirror, place, side_by_side
from paceline.schedules.schedule import Round, Schedule, Transfer
from paceline.schedules.topology import Topology


def _distribute(members: tuple[int, ...], num_shards: int, shard_blocks: int) -> Round:
    """Each owner gives its shard to all other ranks of the host."""
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


def _hierarchical(topology: Topology, name: str, across: Callable[[int], Schedule]) -> Schedule:
    hosts = topology.ranks_of_host
    num_shards = min(map(len, hosts))
    between = across(len(hosts))
    distribute: Rounds = side_by_side(
        [(_distribute(host, num_shards, between.num_blocks),) for host in hosts]
    )
    distribute = tuple(transfers for transfers in distribute if transfers)
    middle = side_by_side(
        place(between.rounds, [host[shard] for host in hosts], shard * between.num_blocks)
        for shard in range(num_shards)
    )
    return Schedule(
        name,
        topology.num_ranks,
        num_shards * between.num_blocks,
        mirror(distribute) + middle + distribute,
    )


@lru_cache(maxsize=32)
def over_ring(topology: Topology) -> Schedule:
    """A ring of hosts for each shard: 2(H-1) + 2 rounds."""
    return _hierarchical(topology, "hierarchical_ring", ring.all_reduce)


@lru_cache(maxsize=32)
def over_halving_doubling(topology: Topology) -> Schedule:
    """Halving-doubling of hosts for each shard: 2 log2 H + 2 rounds."""
    return _hierarchical(topology, "hierarchical_halving_doubling", halving_doubling.all_reduce)
