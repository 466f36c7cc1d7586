"""A row's learning rate: the library's curve, with the step as its unit."""

from __future__ import annotations

from paceline.lab.study.rows import Row
from paceline.optim import Curve, rate_factor


def curve(row: Row, num_steps: int) -> Curve:
    """Warm-up, then a straight line down to nothing."""
    num_warm = 0 if row.warmup == "none" else round(row.warmup_ratio * num_steps)
    return Curve(num_steps, num_warm, row.warmup, decay="linear")


def rate_at(row: Row, reference: float, factor: int, step: int, num_steps: int) -> float:
    """The rate of a step of a training with `factor` times the reference batch, counted from 0."""
    peak = reference * rate_factor(row.scaling, factor, 1)
    return curve(row, num_steps).rate(step, reference, peak)
