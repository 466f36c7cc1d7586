"""Predictions that training asks for before it acts: the time of a step, the shares that end soonest. Pure Python."""

from paceline.planning.decision import Decision, Rules, decide
from paceline.planning.replay import AlphaBetaCost, BucketLoad
from paceline.planning.shares import (
    Proposal,
    Speed,
    SpeedEstimate,
    best_shares,
    lower_bound_s,
    makespan_s,
    propose,
)
from paceline.planning.step_time import (
    Prediction,
    ReductionCost,
    StepProfile,
    calibration_slowdown,
    crossover_slowdown,
    predict,
)

__all__ = [
    "AlphaBetaCost",
    "BucketLoad",
    "Decision",
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
    "lower_bound_s",
    "makespan_s",
    "predict",
    "propose",
]
