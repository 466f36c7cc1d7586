"""Predicts the duration of a step from measured times, and decides whether compression shortens it; without torch."""

from paceline.planning.decision import Decision, Rules, decide
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
    "ReductionCost",
    "Rules",
    "StepProfile",
    "calibration_slowdown",
    "crossover_slowdown",
    "decide",
    "predict",
]
