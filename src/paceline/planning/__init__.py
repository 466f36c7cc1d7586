"""Predicts how long steps take, from measured times: with compression, other shares, other clusters; without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.late_imports import on_first_use

if TYPE_CHECKING:  # training needs a few of these, and should not wait for the simulator
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

__getattr__ = on_first_use(
    __name__,
    {
        "NO_EMULATION": "hardware",
        "BucketLoad": "step_time",
        "Cluster": "hardware",
        "CollectiveCost": "collective_time",
        "Decision": "decision",
        "EmulationCost": "hardware",
        "HostLink": "hardware",
        "LayerTimes": "recorded_workload",
        "Line": "step_time",
        "Plan": "training_plan",
        "Prediction": "step_time",
        "Proposal": "shares",
        "ReductionCost": "step_time",
        "Rules": "decision",
        "Servers": "collective_time",
        "Simulation": "simulator",
        "Speed": "shares",
        "SpeedEstimate": "shares",
        "StepProfile": "step_time",
        "Workload": "recorded_workload",
        "best_shares": "shares",
        "calibration_slowdown": "step_time",
        "collective_cost": "collective_time",
        "crossover_slowdown": "step_time",
        "decide": "decision",
        "finish_s": "shares",
        "ideal_s": "shares",
        "predict": "step_time",
        "propose": "shares",
        "simulate": "simulator",
    },
)

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
