"""`paceline plan`: records a script, asks a simulator how it would scale, and shows the answer; without torch."""

from paceline.plan.collective_time import CollectiveCost, collective_cost
from paceline.plan.deployment import Cluster, HostLink, ReductionPlan, Servers
from paceline.plan.simulator import Simulation, simulate
from paceline.plan.workload import LayerTimes, RecordedWorkload

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
    "simulate",
]
