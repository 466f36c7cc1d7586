"""What happened in a step, and when: the records that reports, planners and traces read."""

from paceline.observe.timings import BucketTiming, StepTiming, StepTimings

__all__ = ["BucketTiming", "StepTiming", "StepTimings"]
