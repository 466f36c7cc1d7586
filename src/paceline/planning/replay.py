"""Replays one step: buckets are ready, leave in order, share the wire, and arrive.

    computing   |--bucket 0--(launch 0)--bucket 1--(launch 1)----bucket 2--(launch 2)|(finish 0)(finish 1)   (finish 2)
    wire                                |------ 0 ------|        |------ 1 ------|---- 2 ----|

Rules
1. Launching blocks the thread that computes gradients, so it delays all later buckets. Finishing happens after
   backward, bucket by bucket, while later ones may still be on the wire.
2. A process group performs its collectives one after another, in launch order.
3. A collective first waits (latencies), then flows.

Everything that predicts a step's time calls this: the doctor, the planner's simulator, and the benchmarks' limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.errors import ConfigurationError


@dataclass(frozen=True)
class AlphaBetaCost:
    """The alpha-beta model of a transfer: a fixed time and a time per byte, both at least 0."""

    fixed_s: float
    s_per_byte: float

    def __post_init__(self) -> None:
        if not (0 <= self.fixed_s < math.inf and 0 <= self.s_per_byte < math.inf):
            raise ConfigurationError(f"{self}: both times are finite and at least 0")

    def of(self, size_bytes: float) -> float:
        return self.fixed_s + self.s_per_byte * size_bytes

    @classmethod
    def through(cls, small: tuple[float, float], large: tuple[float, float]) -> AlphaBetaCost:
        """Return the line through two measurements (bytes, seconds), with neither time negative.

        The time is proportional to the bytes if `large` has no more of them than `small`.
        """
        (few, few_s), (many, many_s) = small, large
        slope = (many_s - few_s) / (many - few) if many > few else math.inf
        fixed_s = few_s - slope * few
        if many <= few or fixed_s < 0:  # proportional
            return cls(0.0, max(many_s, 0.0) / many)
        if slope < 0:  # noise: all of it fixed
            return cls(max((few_s + many_s) / 2, 0.0), 0.0)
        return cls(fixed_s, slope)


@dataclass(frozen=True)
class Wire:
    """One collective as the wire sees it."""

    fixed_s: float  # Before anything flows: latencies, software. Does not use up the link.
    link_s: float  # how long its bytes fill the link
    alone_s: float  # how long they flow when nothing else does: more than `link_s` where one connection cannot fill it

    @property
    def total_s(self) -> float:
        return self.fixed_s + self.alone_s


@dataclass(frozen=True)
class Replay:
    """The times of all events of a step, in seconds from the start of backward."""

    computed_s: float  # backward was done
    arrivals_s: tuple[float, ...]  # each bucket had been reduced
    end_s: float  # all had been finished

    @property
    def exposed_s(self) -> float:
        """Return the communication that backward does not hide."""
        return self.end_s - self.computed_s


Arrive = Callable[[Sequence[float], Sequence[Wire]], Sequence[float]]


def in_one_lane(starts_s: Sequence[float], wires: Sequence[Wire]) -> list[float]:
    """Return when each collective ends, one after another."""
    free_s, arrivals_s = 0.0, []
    for start_s, wire in zip(starts_s, wires, strict=True):
        free_s = max(free_s, start_s) + wire.total_s
        arrivals_s.append(free_s)
    return arrivals_s


def replay(
    ready_s: Sequence[float],  # when each would be ready if launching took no time, in launch order
    wires: Sequence[Wire],  # its collective
    computed_s: float,  # when backward would end if launching took no time
    launch_s: Sequence[float] = (),  # what launching each takes; empty: nothing
    finish_s: Sequence[float] = (),  # what finishing each takes; empty: nothing
    arrive: Arrive = in_one_lane,  # when collectives that start at these times end
) -> Replay:
    """Replay the buckets of one step."""
    late_s, starts_s = 0.0, []
    for i, when_s in enumerate(ready_s):
        if launch_s:
            late_s += launch_s[i]
        starts_s.append(when_s + late_s)
    arrivals_s = arrive(starts_s, wires)
    now_s = computed_s = computed_s + late_s
    for i, arrival_s in enumerate(arrivals_s):
        now_s = max(now_s, arrival_s) + (finish_s[i] if finish_s else 0.0)
    return Replay(computed_s, tuple(arrivals_s), now_s)
