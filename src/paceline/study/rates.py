"""A row's learning rate at each step: warm-up, then a straight line down to nothing."""

from __future__ import annotations

from paceline.study.rows import Row


def rate_at(row: Row, reference: float, factor: int, step: int, num_steps: int) -> float:
    full = reference * row.scale(factor)
    num_warm = 0 if row.warmup == "none" else round(row.warmup_ratio * num_steps)
    if step < num_warm:
        return reference if row.warmup == "constant" else reference + (full - reference) * step / num_warm
    return full * (num_steps - step) / (num_steps - num_warm)
