"""Every algorithm, by name: the choice takes its candidates from here, and one contract test takes all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from paceline.schedules import (
    circulant,
    direct,
    halving_doubling,
    hierarchical,
    recursive_doubling,
    ring,
    tree,
    vector_halving,
)
from paceline.schedules.schedule import Schedule
from paceline.schedules.topology import Topology

Operation = Literal[
    "all_reduce", "all_reduce_between_hosts", "adasum", "reduce_scatter", "all_gather", "broadcast", "reduce"
]


@dataclass(frozen=True)
class Algorithm:
    """A way to perform an operation."""

    operation: Operation
    build: Callable[[Topology], Schedule]
    """For the ranks of a topology; rooted operations have rank 0 as the root."""
    needs_hosts: bool = False
    """Whether it only makes sense for several hosts of which one has several ranks."""

    def fits(self, topology: Topology) -> bool:
        return not self.needs_hosts or 1 < topology.num_hosts < topology.num_ranks


def _flat(operation: Operation, build: Callable[[int], Schedule]) -> Algorithm:
    return Algorithm(operation, lambda topology: build(topology.num_ranks))


def _hierarchical(name: str, across: Callable[[int], Schedule]) -> Algorithm:
    return Algorithm(
        "all_reduce", lambda topology: hierarchical.all_reduce(topology, name, across), needs_hosts=True
    )


def _between(name: str, across: Callable[[int], Schedule]) -> Algorithm:
    return Algorithm(
        "all_reduce_between_hosts", lambda topology: hierarchical.between_hosts(topology, name, across)
    )


_FLAT: dict[str, Callable[[int], Schedule]] = {
    "recursive_doubling": recursive_doubling.all_reduce,
    "direct": direct.all_reduce,
    "halving_doubling": halving_doubling.all_reduce,
    "circulant": circulant.all_reduce,
    "ring": ring.all_reduce,
}

SCHEDULES: dict[str, Algorithm] = {
    **{name: _flat("all_reduce", build) for name, build in _FLAT.items()},
    **{(name := f"hierarchical_{flat}"): _hierarchical(name, build) for flat, build in _FLAT.items()},
    **{(name := f"between_hosts_{flat}"): _between(name, build) for flat, build in _FLAT.items()},
    "vector_halving": Algorithm("adasum", vector_halving.all_reduce),
    "reduce_scatter_direct": _flat("reduce_scatter", direct.reduce_scatter),
    "reduce_scatter_circulant": _flat("reduce_scatter", circulant.reduce_scatter),
    "reduce_scatter_ring": _flat("reduce_scatter", ring.reduce_scatter),
    "all_gather_direct": _flat("all_gather", direct.all_gather),
    "all_gather_circulant": _flat("all_gather", circulant.all_gather),
    "all_gather_ring": _flat("all_gather", ring.all_gather),
    "broadcast_tree": _flat("broadcast", tree.broadcast),
    "reduce_tree": _flat("reduce", tree.reduce),
}
