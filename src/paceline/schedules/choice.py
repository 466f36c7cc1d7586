"""Which algorithm: the cheapest by the predicted time, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from paceline.errors import ConfigurationError
from paceline.schedules.price import Price, price
from paceline.schedules.schedule import Schedule
from paceline.schedules.table import SCHEDULES, Operation
from paceline.schedules.topology import Links, Topology


@dataclass(frozen=True)
class Choice:
    """What was chosen for a message, among what, and why."""

    schedule: Schedule
    prices: Mapping[str, Price]
    """Of all candidates, the cheapest first."""
    why: str


@lru_cache(maxsize=256)
def choose(
    operation: Operation,
    message_bytes: int,
    topology: Topology,
    links: Links,
    *,
    element_bytes: int = 4,
    partial_bytes: int | None = None,
    only: str | None = None,
) -> Choice:
    """The algorithm with the least predicted time.

    Args:
        operation: What to perform; rooted operations from rank 0.
        message_bytes: Length of the buffer: all that a rank ends with, or starts from.
        topology: Where the ranks are.
        links: What lies between them.
        element_bytes: Size of an element.
        partial_bytes: Size of an element of a partial result on the wire, where that differs (see `price`).
        only: The name of the one algorithm to consider.

    Contract:
        Local. Ranks that pass the same arguments choose the same; links must be agreed on, not measured by each.
    """
    prices = {
        name: price(
            algorithm.build(topology),
            message_bytes,
            topology,
            links,
            element_bytes=element_bytes,
            partial_bytes=partial_bytes,
        )
        for name, algorithm in SCHEDULES.items()
        if algorithm.operation == operation and algorithm.fits(topology) and only in {None, name}
    }
    if not prices:
        asked = f" called {only!r}" if only else ""
        raise ConfigurationError(
            f"no schedule{asked} performs {operation!r} over {topology}; there are {', '.join(SCHEDULES)}"
        )
    order = sorted(prices, key=lambda name: prices[name].time_s)  # ties: the table's order
    ranked = {name: prices[name] for name in order}
    return Choice(
        SCHEDULES[order[0]].build(topology),
        MappingProxyType(ranked),
        _why(operation, message_bytes, topology, ranked),
    )


def _why(operation: str, message_bytes: int, topology: Topology, ranked: Mapping[str, Price]) -> str:
    first, *others = (f"{name} ({_words(price)})" for name, price in ranked.items())
    against = f"; next {others[0]}" if others else "; there is no other"
    return f"{operation} of {message_bytes:,} bytes over {topology}: {first}{against}"


def _words(price: Price) -> str:
    rounds = f"{price.rounds} round" + "s" * (price.rounds != 1)
    words = f"{price.time_s * 1e3:.3g} ms: {rounds}, {price.bytes_per_rank:,} bytes a rank"
    over = max(price.bytes_over_links)
    return f"{words}, {over:,} over a host's link" if over else words
