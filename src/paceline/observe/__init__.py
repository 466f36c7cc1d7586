"""Records of what happened in a step, and when: reports, planners and traces read them.

The records import torch's profiler; the format of a trace, which `paceline plan` reads, imports nothing.
"""

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
        "BucketTiming": "run_records",
        "StepTiming": "timings",
        "StepTimings": "timings",
        "MetricsServer": "metrics",
        "open_metrics": "metrics",
        "step_metrics": "metrics",
        "write_metrics": "metrics",
    },
)
