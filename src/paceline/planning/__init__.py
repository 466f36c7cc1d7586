"""Predicts how long steps take, from measured times: with compression, other shares, other clusters; without torch."""

from paceline.planning.collective_time import CollectiveCost, Servers, collective_cost
from paceline.planning.decision import Decision, Rules, decide
from paceline.planning.hardware import NO_EMULATION, Cluster, EmulationCost, HostLink
from paceline.planning.recorded_workload import LayerTimes, Workload
from paceline.planning.shares import (
    Proposal,
    Speed,
    SpeedEstimate,
    best_shares,
    finish_s,
    ideal_s,
    propose,
)
from paceline.planning.simulator import Simulation, simulate
from paceline.planning.step_time import (
    BucketLoad,
    Line,
    Prediction,
    ReductionCost,
    StepProfile,
    calibration_slowdown,
    crossover_slowdown,
    predict,
)
from paceline.planning.training_plan import Plan

__all__ = [
    "NO_EMULATION",
    "BucketLoad",
    "Cluster",
    "CollectiveCost",
    "Decision",
    "EmulationCost",
    "HostLink",
    "LayerTimes",
    "Line",
    "Plan",
    "Prediction",
    "Proposal",
    "ReductionCost",
    "Rules",
    "Servers",
    "Simulation",
    "Speed",
    "SpeedEstimate",
    "StepProfile",
    "Workload",
    "best_shares",
    "calibration_slowdown",
    "collective_cost",
    "crossover_slowdown",
    "decide",
    "finish_s",
    "ideal_s",
    "predict",
    "propose",
    "simulate",
]
