"""Vector halving, distance doubling: an all-reduce whose fold needs to know the whole vectors (Adasum).

The ranks are the leaves of a tree over 0 to P-1; each node's left side gets the larger half of its ranks. 2^m is the
largest power of two up to P, and the nodes of depth m have one rank or two.
1. Fold in: the second of two ranks gives its whole message to the first, which stands for both (none if P = 2^m).
2. There are m levels, from depth m-1 up to the root. The 2^m ranks that are left exchange halves with the partner at
   distance 1, 2, 4, ... among them, as in halving-doubling. At each level a *team*, the ranks under one node, holds one
   pair of vectors; each member has a part of both. It computes partial dot products, the team sums them (*completion*,
   a small all-reduce within the team, by recursive doubling), and then each folds its part.
3. The same backwards: ranks give what they hold to those they had it from.

Hosts with several ranks: the message is cut into as many shards as the smallest host has ranks. Before step 1 each
owner sums its shard over its host's ranks. Steps 1 to 3 run for all shards at once, with a host in the place of a
rank. A team is all owners on its hosts. In the end owners give the result to their host's ranks.

Rounds: 2 log2 P, for P a power of two; otherwise two more. With several ranks per host two more, and H hosts count as
P. Completions: one a level, of ceil(log2 team size) rounds. Bytes sent, n the message: 2(P-1)/P n by each rank for P
a power of two. Else, Q = 2^m, at most 2(Q-1)/Q n + n.

Source: Maleki et al. 2021, "Scaling distributed training with adaptive summation", section 4.2 (AdasumRVH). There P is
a power of two; folding in, the tree for any P and hosts with several ranks are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from paceline.schedules.flat import recursive_doubling
from paceline.schedules.halving_doubling import kept
from paceline.schedules.hierarchical import hand_out, num_shards
from paceline.schedules.schedule import Round, Rounds, Schedule, Transfer, mirror, place, side_by_side
from paceline.schedules.topology import Topology


@dataclass(frozen=True)
class Team:
    """The ranks that together hold one pair of vectors."""

    ranks: tuple[int, ...]
    left: frozenset[int]
    """Those of them whose own vector is the left one."""
    num_left: int
    """Ranks that the left vector stands for."""
    num_right: int
    is_leaf: tuple[bool, bool]
    """Whether the left, and the right, vector is that of one host, with nothing folded into it before."""


@dataclass(frozen=True, eq=False)
class Level:
    """One level of the tree: halves change hands, then each team completes its dot products and folds."""

    halving: Round
    teams: tuple[Team, ...]
    completion: Schedule
    """Sums a team's partial dot products; one block."""

    def team_of(self, rank: int) -> Team | None:
        return next((team for team in self.teams if rank in team.ranks), None)


@dataclass(frozen=True, eq=False)
class VectorHalving:
    """The schedule of the whole algorithm, level by level."""

    topology: Topology
    num_blocks: int
    within: Schedule
    """A sum over each host, shard by shard to its owner; no round where hosts have one rank each."""
    levels: tuple[Level, ...]
    spread: Schedule
    """The result, from those that hold a part of it to all."""
    tell: Schedule
    """One block from ranks of the last team to all others, for what only the last team knows."""

    @cached_property
    def schedule(self) -> Schedule:
        """Return all rounds that move parts of the message."""
        rounds = self.within.rounds + tuple(level.halving for level in self.levels) + self.spread.rounds
        return Schedule("vector_halving", self.topology.num_ranks, self.num_blocks, rounds)


def bounds(num_leaves: int, num_nodes: int) -> tuple[int, ...]:
    """Return where the nodes of one depth of the tree begin and end: node k has leaves [bounds[k], bounds[k + 1]).

    `num_nodes` is a power of two, at most `num_leaves`.
    """
    sizes = [num_leaves]
    while len(sizes) < num_nodes:
        sizes = [half for size in sizes for half in ((size + 1) // 2, size // 2)]
    edges = [0]
    for size in sizes:
        edges.append(edges[-1] + size)
    return tuple(edges)


@lru_cache(maxsize=32)
def vector_halving(topology: Topology) -> VectorHalving:
    """Build the tree over the hosts of `topology`, in the order of their numbers."""
    hosts = topology.ranks_of_host
    shards = num_shards(topology)
    depth = len(hosts).bit_length() - 1
    nodes = bounds(len(hosts), 1 << depth)
    tree = _Tree(hosts, shards, nodes)
    levels = [tree.fold_in()] if len(hosts) != 1 << depth else []
    levels += [tree.halve(t) for t in range(depth)]
    within = side_by_side((hand_out(host, shards, 1 << depth),) for host in hosts if len(host) > 1)
    num_blocks = shards << depth
    spread = mirror(level.halving for level in levels) + within
    return VectorHalving(
        topology,
        num_blocks,
        Schedule("host_sum", topology.num_ranks, num_blocks, mirror(within)),
        tuple(levels),
        Schedule("adasum_spread", topology.num_ranks, num_blocks, spread),
        Schedule("adasum_tell", topology.num_ranks, 1, _tell(topology.num_ranks, levels)),
    )


def all_reduce(topology: Topology) -> Schedule:
    """Return the rounds of `vector_halving`; completions are not among them."""
    return vector_halving(topology).schedule


@dataclass(frozen=True)
class _Tree:
    """Makes the levels; host `nodes[k]` works for the hosts up to `nodes[k + 1]`."""

    hosts: tuple[tuple[int, ...], ...]
    shards: int
    nodes: tuple[int, ...]

    def _owners(self, hosts: list[int]) -> tuple[int, ...]:
        return tuple(rank for host in hosts for rank in self.hosts[host][: self.shards])

    def _num_ranks(self, first: int, last: int) -> int:
        return sum(len(host) for host in self.hosts[first:last])

    def _level(self, halving: Round, teams: list[Team]) -> Level:
        num_ranks = sum(map(len, self.hosts))
        rounds = side_by_side(
            place(recursive_doubling(len(team.ranks)).rounds, team.ranks, 0) for team in teams
        )
        return Level(halving, tuple(teams), Schedule("completion", num_ranks, 1, rounds))

    def fold_in(self) -> Level:
        """Return the level in which the nodes of one host give all they have to those of another."""
        blocks = len(self.nodes) - 1
        transfers, teams = [], []
        for first, last in zip(self.nodes, self.nodes[1:], strict=False):
            if last - first == 1:
                continue
            owners = self._owners([first])
            transfers += [
                Transfer(
                    self.hosts[first + 1][s], self.hosts[first][s], s * blocks, (s + 1) * blocks, fold=True
                )
                for s in range(self.shards)
            ]
            sizes = self._num_ranks(first, first + 1), self._num_ranks(first + 1, last)
            teams.append(Team(owners, frozenset(owners), *sizes, is_leaf=(True, True)))
        return self._level(tuple(transfers), teams)

    def halve(self, t: int) -> Level:
        """Let partners at distance 2^t give each other the half that the receiver keeps."""
        blocks = len(self.nodes) - 1
        transfers, teams = [], []
        for s in range(self.shards):
            for i in range(blocks):
                first, last = kept(i ^ 1 << t, t + 1, blocks)
                source, target = self.hosts[self.nodes[i]][s], self.hosts[self.nodes[i ^ 1 << t]][s]
                transfers.append(Transfer(source, target, s * blocks + first, s * blocks + last, fold=True))
        for begin in range(0, blocks, 2 << t):
            middle, end = begin + (1 << t), begin + (2 << t)
            left = self._owners([self.nodes[i] for i in range(begin, middle)])
            right = self._owners([self.nodes[i] for i in range(middle, end)])
            edges = self.nodes[begin], self.nodes[middle], self.nodes[end]
            sizes = self._num_ranks(*edges[:2]), self._num_ranks(*edges[1:])
            is_leaf = edges[1] - edges[0] == 1, edges[2] - edges[1] == 1
            teams.append(Team(left + right, frozenset(left), *sizes, is_leaf))
        return self._level(tuple(transfers), teams)


def _tell(num_ranks: int, levels: list[Level]) -> Rounds:
    if not levels:
        return ()
    knows = levels[-1].teams[0].ranks
    others = [rank for rank in range(num_ranks) if rank not in knows]
    told = tuple(
        Transfer(knows[place % len(knows)], rank, 0, 1, fold=False) for place, rank in enumerate(others)
    )
    return (told,) if told else ()
