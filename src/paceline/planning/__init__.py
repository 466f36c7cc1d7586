"""Predicts how long a step takes, from measured times: with compression, with other shares; without torch."""

from paceline.planning.decision import Decision, Rules, decide
from paceline.planning.shares import (
    Proposal,
    Speed,
    SpeedEstimate,
    best_shares,
    finish_s,
    ideal_s,
    propose,
)
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

__all__ = [
    "BucketLoad",
    "Decision",
    "Line",
    "Prediction",
    "Proposal",
    "ReductionCost",
    "Rules",
    "Speed",
    "SpeedEstimate",
    "StepProfile",
    "best_shares",
    "calibration_slowdown",
    "crossover_slowdown",
    "decide",
    "finish_s",
    "ideal_s",
    "predict",
    "propose",
]
