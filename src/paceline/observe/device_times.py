"""Times at which a device came to the stations of one backward: events on its streams, read once it has passed them.

The host runs ahead of a device: what it sees of a step is when it told the device to do something. So a step's record
has host times at first, and others once the device has done the step.
"""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from paceline.observe.run_records import BucketTiming
    from paceline.observe.timings import StepTiming


class DeviceClock:
    """Times of an accelerator, which computes later: marks are queued between its kernels, on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        """Note the moment at which the device gets here."""
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def is_past(self, mark: Any) -> bool:
        """Return whether the device has come there. Does not wait."""
        return bool(mark.query())

    def between_s(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks; waits for the second."""
        if not end.query():
            end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3


def name_of(device: torch.device) -> str:
    """Return a device's name, in words."""
    if device.type == "cpu":
        return f"{platform.machine()} CPU"
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if named is None else str(named(device))


@dataclass
class BucketMarks:
    """The events of one bucket."""

    launched: Any  # behind its last gradient
    done: Any = None  # where its collective has ended; None: the group does not say
    awaited: Any = None  # where a stream begins to wait for it
    arrived: Any = None  # where that goes on


@dataclass
class DeviceTimes:
    """The marks of one backward, by the device's clock."""

    clock: DeviceClock
    started: Any
    started_s: float  # the host's time then
    buckets: dict[int, BucketMarks] = field(default_factory=dict)  # by index
    ended: Any = None  # autograd had nothing left to do
    finished: Any = None  # the stream has waited for all buckets

    @classmethod
    def begin(cls, device: torch.device) -> DeviceTimes:
        clock = DeviceClock(device)
        return cls(clock, clock.mark(), time.perf_counter())

    def launch(self, index: int) -> None:
        self.buckets[index] = BucketMarks(self.clock.mark())

    def done(self, index: int) -> None:
        """Mark the end of a bucket's collective. Called on a stream that has waited for it."""
        self.buckets[index].done = self.clock.mark()

    def arrive(self, index: int, since: Any = None) -> None:
        """Mark that the current stream has to wait for this bucket, since `since` or else the last arrival."""
        marks = self.buckets[index]
        marks.awaited = since or self.finished
        marks.arrived = self.finished = self.clock.mark()

    def end(self) -> None:
        if self.ended is None:
            self.ended = self.finished = self.clock.mark()

    def is_past(self) -> bool:
        """Return whether the device has come past all of it. Does not wait."""
        ends = [self.finished, *(marks.done for marks in self.buckets.values())]
        return all(self.clock.is_past(mark) for mark in ends if mark is not None)

    def settle(self, timing: StepTiming) -> StepTiming:
        """Return the step's record with the device's times. Waits for the device if it is not past the step."""
        if self.ended is None:
            return timing

        def at(mark: Any) -> float:
            return self.started_s + self.clock.between_s(self.started, mark)

        def of(bucket: BucketTiming) -> BucketTiming:
            marks = self.buckets.get(bucket.index)
            if marks is None or marks.arrived is None:
                return bucket
            launched_s, arrived_s = at(marks.launched), at(marks.arrived)
            return replace(
                bucket,
                ready_s=launched_s,
                launched_s=launched_s,
                done_s=arrived_s if marks.done is None else min(at(marks.done), arrived_s),
                waited_s=max(0.0, arrived_s - at(marks.awaited)),
            )

        buckets = tuple(map(of, timing.buckets))
        return replace(
            timing,
            started_s=self.started_s,
            backward_s=at(self.ended) - self.started_s,
            exposed_s=sum(bucket.waited_s for bucket in buckets),
            buckets=buckets,
        )
