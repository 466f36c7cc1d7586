"""What the steps took on this rank, in the form in which the ranks agree on it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence

from paceline.observe import StepTiming
from paceline.planning import BucketLoad, StepProfile


class Stopwatch:
    """From the end of one step to the end of the next, and where in between the buckets were.

    Args:
        now: The time, as in a `StepTiming`.
        cpu: Processor time of this process.
        num_processors: That the ranks of this host share.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] = time.process_time,
        num_processors: float | None = None,
    ) -> None:
        self._now, self._cpu = now, cpu
        self._num_processors = num_processors or _processors_a_rank()
        self._ended_s: float | None = None
        self._cpu_s = 0.0
        self._launch_s: dict[int, float] = {}
        self._sizes: dict[int, int] = {}

    def begin_step(self) -> None:
        self._launch_s, self._sizes = {}, {}

    def launched(self, index: int, since_s: float, size_bytes: int) -> None:
        """Bucket `index` has been launched."""
        self._launch_s[index] = self._now() - since_s
        self._sizes[index] = size_bytes

    def abandon(self) -> None:
        """A step did not end well: the next one's time is unknown."""
        self._ended_s = None

    def end_step(self, timing: StepTiming) -> tuple[float, StepProfile] | None:
        """The step's period and profile; None of the first, and where there was no backward (local steps)."""
        before_s, self._ended_s = self._ended_s, self._now()
        cpu_before_s, self._cpu_s = self._cpu_s, self._cpu()
        if before_s is None or not timing.buckets:
            return None
        computed_s = timing.started_s + timing.backward_s
        late_s, loads = 0.0, []
        end_s = computed_s
        for bucket in timing.buckets:
            if bucket.index not in self._launch_s:
                continue  # a sparse one, which no codec shortens
            loads.append(BucketLoad(bucket.launched_s - late_s - before_s, self._sizes[bucket.index]))
            late_s += self._launch_s[bucket.index]
            if bucket.launched_s < computed_s:
                end_s -= self._launch_s[bucket.index]
        period_s = self._ended_s - before_s
        busy_ratio = min((self._cpu_s - cpu_before_s) / period_s / self._num_processors, 1.0)
        return period_s, StepProfile(end_s - before_s, tuple(loads), busy_ratio)


def _processors_a_rank() -> float:
    """This host's, divided by its ranks, by what the launcher says."""
    return len(os.sched_getaffinity(0)) / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def median_profile(profiles: Sequence[StepProfile]) -> list[float]:
    """The medians of the share of busy processors, the end of backward, and the times of each bucket being ready."""
    ready = zip(*[[bucket.ready_s for bucket in profile.buckets] for profile in profiles], strict=True)
    return [
        statistics.median(profile.busy_ratio for profile in profiles),
        statistics.median(profile.backward_end_s for profile in profiles),
        *map(statistics.median, ready),
    ]


def profile_of(numbers: Sequence[float], sizes_bytes: Sequence[int]) -> StepProfile:
    """Read what `median_profile` has written."""
    busy_ratio, backward_end_s, *ready_s = numbers
    return StepProfile(backward_end_s, tuple(map(BucketLoad, ready_s, sizes_bytes)), busy_ratio)


class Periods:
    """The times of recent steps with and without a codec."""

    def __init__(self) -> None:
        self._periods_s: dict[str | None, list[float]] = {}

    def add(self, codec: str | None, period_s: float) -> None:
        self._periods_s.setdefault(codec, []).append(period_s)

    def medians(self, codecs: Sequence[str | None]) -> list[float]:
        """Of each codec's steps; 0 of one that had none."""
        return [statistics.median(self._periods_s.get(codec) or [0.0]) for codec in codecs]

    def clear(self) -> None:
        self._periods_s = {}
