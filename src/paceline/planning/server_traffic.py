"""When pushes reach parameter servers, and pulls reach the ranks: two streams, the second a piece behind the first.

Rules
1. Pushes stream one behind another, as buckets are ready; pulls as well, each as soon as the last rank has pushed it.
2. A link that several connections share does not carry both directions at their full rates at once: each gets a part of
   it. Acknowledgements wait behind data of the other direction, and a piece waits for its slowest connection.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_EPSILON = 1e-12


@dataclass(frozen=True)
class Load:
    """A bucket, or a piece of one, as the fullest link sees it.

    Attributes:
        ready_s: When it may be pushed.
        way_s: How long it fills the link, in each direction.
        num_pieces: That are pulled one by one.
    """

    ready_s: float
    way_s: float
    num_pieces: int = 1


def pulled(loads: Sequence[Load], latency_s: float, two_way_ratio: float = 1.0) -> list[float]:
    """When each bucket has been pulled by all ranks.

    Args:
        loads: In the order in which they are pushed.
        latency_s: Of each way.
        two_way_ratio: Of the link's rate, in each direction, while both are in use.
    """
    pieces = [
        Load(load.ready_s, load.way_s / load.num_pieces) for load in loads for _ in range(load.num_pieces)
    ]
    pushes = _Stream([piece.ready_s for piece in pieces], pieces)
    pulls = _Stream([math.inf] * len(pieces), pieces)
    now_s = 0.0
    while pulls.index < len(pieces):
        both = pushes.flows(now_s) and pulls.flows(now_s)
        rate = two_way_ratio if both else 1.0
        next_s = min(pushes.next_s(now_s, rate), pulls.next_s(now_s, rate))
        if (pushed := pushes.advance(now_s, next_s, rate)) is not None:
            pulls.starts_s[pushed] = next_s + latency_s
        pulls.advance(now_s, next_s, rate)
        now_s = next_s
    ends_s, last = [], -1
    for load in loads:
        last += load.num_pieces
        ends_s.append(pulls.ends_s[last] + latency_s)
    return ends_s


class _Stream:
    """Pieces that flow one behind another in one direction."""

    def __init__(self, starts_s: list[float], pieces: Sequence[Load]) -> None:
        self.starts_s = starts_s
        self.ends_s: list[float] = []
        self.index = 0
        self._pieces = pieces
        self._left_s = pieces[0].way_s if pieces else 0.0

    def flows(self, now_s: float) -> bool:
        return self.index < len(self._pieces) and self.starts_s[self.index] <= now_s + _EPSILON

    def next_s(self, now_s: float, rate: float) -> float:
        """When something changes here."""
        if self.index == len(self._pieces):
            return math.inf
        return now_s + self._left_s / rate if self.flows(now_s) else self.starts_s[self.index]

    def advance(self, now_s: float, until_s: float, rate: float) -> int | None:
        """Let it flow; the piece that is through then, if one is."""
        if not self.flows(now_s):
            return None
        self._left_s -= (until_s - now_s) * rate
        if self._left_s > _EPSILON:
            return None
        done, self.index = self.index, self.index + 1
        self.ends_s.append(until_s)
        self._left_s = self._pieces[self.index].way_s if self.index < len(self._pieces) else 0.0
        return done
