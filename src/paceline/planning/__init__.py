"""What would happen? Predictions from measured times; pure Python, so that they can be made where nothing runs."""

from paceline.planning.compression import Decision, Rules, decide
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
