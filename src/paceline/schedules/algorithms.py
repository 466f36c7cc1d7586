"""The table of all-reduce algorithms, and the choice of the one with the least predicted time for a message.

A new algorithm is a line of `SCHEDULES`: it is then a candidate of the choice, and the contract tests run it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from paceline.errors import ConfigurationError
from paceline.schedules import flat, halving_doubling, hierarchical
from paceline.schedules.flat import circulant, direct, ring
from paceline.schedules.price import Price, price
from paceline.schedules.schedule import Schedule
from paceline.schedules.topology import Links, Topology


@dataclass(frozen=True)
class Algorithm:
    """A way to perform an all-reduce."""

    build: Callable[[Topology], Schedule]
    needs_hosts: bool = False
    """Whether it only makes sense for several hosts of which one has several ranks."""

    def fits(self, topology: Topology) -> bool:
        return not self.needs_hosts or 1 < topology.num_hosts < topology.num_ranks


def _flat(build: Callable[[int], Schedule]) -> Algorithm:
    return Algorithm(lambda topology: build(topology.num_ranks))


def _hierarchical(name: str, across: Callable[[int], Schedule]) -> Algorithm:
    return Algorithm(lambda topology: hierarchical.all_reduce(topology, name, across), needs_hosts=True)


_FLAT: dict[str, Callable[[int], Schedule]] = {
    "recursive_doubling": flat.recursive_doubling,
    "direct": direct.all_reduce,
    "halving_doubling": halving_doubling.all_reduce,
    "circulant": circulant.all_reduce,
    "ring": ring.all_reduce,
}

SCHEDULES: dict[str, Algorithm] = {
    **{name: _flat(build) for name, build in _FLAT.items()},
    **{(name := f"hierarchical_{one}"): _hierarchical(name, build) for one, build in _FLAT.items()},
}


@dataclass(frozen=True)
class Choice:
    """The algorithm chosen for a message, with the prices of all candidates and the reason."""

    schedule: Schedule
    prices: Mapping[str, Price]
    """Of all candidates, the cheapest first."""
    why: str


@lru_cache(maxsize=256)
def choose(
    message_bytes: int,
    topology: Topology,
    links: Links,
    *,
    element_bytes: int = 4,
    only: str | None = None,
) -> Choice:
    """Return the algorithm with the least predicted time, or the one named `only`.

    Local. Ranks that pass the same arguments choose the same; links must be agreed on, not measured by each.
    """
    prices = {
        name: price(algorithm.build(topology), message_bytes, topology, links, element_bytes=element_bytes)
        for name, algorithm in SCHEDULES.items()
        if algorithm.fits(topology) and only in {None, name}
    }
    if not prices:
        asked = f" called {only!r}" if only else ""
        raise ConfigurationError(f"no schedule{asked} is for {topology}; there are {', '.join(SCHEDULES)}")
    order = sorted(prices, key=lambda name: prices[name].time_s)  # ties: the table's order
    ranked = {name: prices[name] for name in order}
    why = _why(message_bytes, topology, ranked)
    return Choice(SCHEDULES[order[0]].build(topology), MappingProxyType(ranked), why)


def _why(message_bytes: int, topology: Topology, ranked: Mapping[str, Price]) -> str:
    first, *others = (f"{name} ({_words(price)})" for name, price in ranked.items())
    against = f"; next {others[0]}" if others else "; there is no other"
    return f"all_reduce of {message_bytes:,} bytes over {topology}: {first}{against}"


def _words(price: Price) -> str:
    rounds = f"{price.rounds} round" + "s" * (price.rounds != 1)
    words = f"{price.time_s * 1e3:.3g} ms: {rounds}, {price.bytes_per_rank:,} bytes a rank"
    over = max(price.bytes_over_links)
    return f"{words}, {over:,} over a host's link" if over else words
