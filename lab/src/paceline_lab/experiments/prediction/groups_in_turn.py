"""Several process groups that take buckets in turn, as `RoundRobin` does: when each bucket arrives.

Bucket i takes lane i mod the number of lanes. Collectives that flow at the same time share the link equally, unless a
connection's own limit gives them less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import ConfigurationError
from paceline.planning.replay import Wire, in_one_lane
from paceline_plan import ReductionPlan

_EPSILON = 1e-12


@dataclass(frozen=True)
class GroupsInTurn(ReductionPlan):
    """A plan over several process groups.

    Attributes:
        num_groups: Number of groups.
    """

    num_groups: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_groups < 1 or (self.priority and self.num_groups > 1):
            raise ConfigurationError(
                f"{self.num_groups} groups in turn are not possible: pass 1 or more, and 1 with priorities."
            )

    def arrivals_s(self, starts_s: Sequence[float], wires: Sequence[Wire]) -> list[float]:
        """One after another in each group."""
        if self.num_groups == 1:
            return in_one_lane(starts_s, wires)
        return in_lanes(starts_s, wires, self.num_groups)

    def describe(self) -> str:
        """Some words for a table."""
        return super().describe() + (f", {self.num_groups} groups in turn" if self.num_groups > 1 else "")


class _Flow:
    def __init__(self, index: int, wire: Wire, flows_from_s: float) -> None:
        self.index = index
        self.flows_from_s = flows_from_s
        self.left_s = wire.link_s  # of the whole link
        self.most = wire.link_s / wire.alone_s if wire.alone_s else 1.0  # of the link


def in_lanes(starts_s: Sequence[float], wires: Sequence[Wire], num_lanes: int) -> list[float]:
    """Return when each collective ends, several at once."""
    queues = [list(range(lane, len(wires), num_lanes)) for lane in range(num_lanes)]
    arrivals_s = [0.0] * len(wires)
    flows: list[_Flow] = []

    def launch_next(lane: int, now_s: float) -> None:
        if queues[lane]:
            index = queues[lane].pop(0)
            flows.append(_Flow(index, wires[index], max(starts_s[index], now_s) + wires[index].fixed_s))

    for lane in range(num_lanes):
        launch_next(lane, 0.0)
    now_s = 0.0
    while flows:
        flowing = [flow for flow in flows if flow.flows_from_s <= now_s + _EPSILON]
        rates = shared_rates([flow.most for flow in flowing])
        ends_s = [
            now_s + flow.left_s / rate if rate else math.inf
            for flow, rate in zip(flowing, rates, strict=True)
        ]
        waiting_s = [flow.flows_from_s for flow in flows if flow not in flowing]
        next_s = min([*ends_s, *waiting_s])
        for flow, rate in zip(flowing, rates, strict=True):
            flow.left_s -= rate * (next_s - now_s)
        done = [flow for flow, end_s in zip(flowing, ends_s, strict=True) if end_s <= next_s + _EPSILON]
        now_s = next_s
        for flow in done:
            arrivals_s[flow.index] = now_s
            flows.remove(flow)
            launch_next(flow.index % num_lanes, now_s)
    return arrivals_s


def shared_rates(limits: Sequence[float]) -> list[float]:
    """Max-min fair parts of one link for flows with limits of their own (1: the whole link)."""
    rates = [0.0] * len(limits)
    left, order = 1.0, sorted(range(len(limits)), key=lambda i: limits[i])
    for place, index in enumerate(order):
        rates[index] = min(limits[index], left / (len(order) - place))
        left -= rates[index]
    return rates
