"""Records of what happened in a step, and when: reports and planners read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.late_imports import on_first_use

if TYPE_CHECKING:
    from paceline.observe.metrics import MetricsServer, open_metrics, step_metrics, write_metrics
    from paceline.observe.run_records import BucketTiming
    from paceline.observe.timings import StepTiming, StepTimings

__all__ = [
    "BucketTiming",
    "MetricsServer",
    "StepTiming",
    "StepTimings",
    "open_metrics",
    "step_metrics",
    "write_metrics",
]

__getattr__ = on_first_use(
    __name__,
    {
        "metrics": "MetricsServer open_metrics step_metrics write_metrics",
        "run_records": "BucketTiming",
        "timings": "StepTiming StepTimings",
    },
)
