"""The planner: it records a training script, simulates its steps on other clusters, and shows how they would scale.

`paceline plan` is its command. It needs no torch, except to record a script or to measure a link.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.late_imports import on_first_use

if TYPE_CHECKING:
    from paceline_plan.collective_time import CollectiveCost, collective_cost
    from paceline_plan.deployment import Cluster, HostLink, ReductionPlan, Servers
    from paceline_plan.simulator import Simulation, simulate
    from paceline_plan.workload import LayerTimes, RecordedWorkload
    from paceline_plan.workload_recording import record_workload

__all__ = [
    "Cluster",
    "CollectiveCost",
    "HostLink",
    "LayerTimes",
    "RecordedWorkload",
    "ReductionPlan",
    "Servers",
    "Simulation",
    "collective_cost",
    "record_workload",
    "simulate",
]

# So that `paceline --help`, which lists this package's command, imports no numpy.
__getattr__ = on_first_use(
    __name__,
    {
        "collective_time": "CollectiveCost collective_cost",
        "deployment": "Cluster HostLink ReductionPlan Servers",
        "simulator": "Simulation simulate",
        "workload": "LayerTimes RecordedWorkload",
        "workload_recording": "record_workload",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
