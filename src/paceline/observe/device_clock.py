"""Two clocks for what a device computes: the host's, and one whose marks are queued between a GPU's kernels."""

from __future__ import annotations

import time
from typing import Any

import torch


class HostClock:
    """Times of a device that computes when it is told to."""

    def mark(self) -> Any:
        """Note this moment."""
        return time.perf_counter()

    def between_s(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks."""
        return float(end - start)


class CudaClock:
    """Times of a device that computes later: marks are queued between its kernels."""

    def mark(self) -> Any:
        """Note the moment at which the device gets here."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_s(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks; waits for the second."""
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3
