"""Searches bucket caps and algorithms in the simulator: which of them makes this workload's step shortest here?

The search is a grid that is refined once: caps from one gradient each to one bucket for everything, doubling, with and
without a smaller first bucket; then the caps between the best one and its neighbours. A step's time is no smooth
function of the cap (buckets are cut between gradients), so nothing cleverer is trusted. Some hundred simulated steps,
well below a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.planning.hardware import Cluster
from paceline.planning.recorded_workload import Workload
from paceline.planning.round_patterns import candidates
from paceline.planning.simulator import simulate
from paceline.planning.training_plan import MEBIBYTE, Plan

_SMALLEST = MEBIBYTE // 8
_BETWEEN = (1 / math.sqrt(2), 1.0, math.sqrt(2))


@dataclass(frozen=True)
class Found:
    """The best plan of a search, and its predicted step."""

    plan: Plan
    step_s: float


def best_caps(workload: Workload, cluster: Cluster, plan: Plan) -> Found:
    """The bucket caps with the shortest predicted step; everything else stays as in `plan`.

    Jitter and loss are left out, so that the answer does not depend on draws. Ties go to the larger cap.
    """
    calm = replace(workload, relative_steps=())
    quiet = cluster.with_links(loss_ratio=0.0)

    def step_s(caps: tuple[float, ...]) -> float:
        return simulate(calm, quiet, replace(plan, caps_bytes=caps)).step_s

    grid = cap_grid(workload.gradient_bytes)
    coarse = {caps: step_s(caps) for caps in grid}
    best = min(coarse, key=lambda caps: (coarse[caps], -caps[-1]))
    if best[-1] != math.inf:
        near = {(*best[:-1], best[-1] * factor) for factor in _BETWEEN}
        near |= {(MEBIBYTE / 4, cap[-1]) for cap in near}
        fine = {caps: step_s(caps) for caps in near}
        coarse |= fine
        best = min(coarse, key=lambda caps: (coarse[caps], -caps[-1]))
    return Found(replace(plan, caps_bytes=best), coarse[best])


def cap_grid(gradient_bytes: int) -> list[tuple[float, ...]]:
    """Caps worth trying for a model of so many bytes: all in one bucket, and from an eighth of a MiB up, doubling."""
    caps: list[tuple[float, ...]] = [(math.inf,)]
    size = float(_SMALLEST)
    while size < gradient_bytes:
        caps += [(size,), (min(size, float(MEBIBYTE)), size)]
        size *= 2
    return list(dict.fromkeys(caps))


def best_algorithm(workload: Workload, cluster: Cluster, plan: Plan, names: Sequence[str] = ()) -> Found:
    """The all-reduce with the shortest predicted step, the same one for all buckets."""
    calm = replace(workload, relative_steps=())
    found = [
        Found(other, simulate(calm, cluster.with_links(loss_ratio=0.0), other).step_s)
        for name in names or candidates(cluster.topology)
        for other in (replace(plan, algorithm=name),)
    ]
    return min(found, key=lambda x: x.step_s)
