"""One record a synchronized step: when each bucket was ready, launched and done, and how long the step waited.

And ranges in torch's profiler for the stations of a gradient's way, named as the fields of these records.

All times are host times of `time.perf_counter()`, in seconds. On an accelerator "done" is when the host had
finished waiting, which is not when the device finished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch.autograd import _profiler_enabled
from torch.autograd.profiler import record_function

HISTORY_STEPS = 256


@dataclass(frozen=True)
class BucketTiming:
    """The life of one bucket in one step.

    Attributes:
        index: Its place in the order in which backward fills buckets.
        size_bytes: Bytes of this rank's gradients in it; 0 if no rank needed them, so that nothing was sent.
        ready_s: When its last gradient was in.
        launched_s: When its reduction was started; later than `ready_s` when an earlier bucket was late.
        done_s: When its reduction had completed.
        waited_s: How long the end of backward waited for it: its share of the exposed communication.
    """

    index: int
    size_bytes: int
    ready_s: float
    launched_s: float
    done_s: float
    waited_s: float

    @property
    def communication_s(self) -> float:
        return self.done_s - self.launched_s


@dataclass(frozen=True)
class StepTiming:
    """One synchronized backward and the forward before it.

    Attributes:
        step: Counts synchronized backwards of this module, from 1.
        forward_s: Duration of the last forward before it.
        started_s: When backward reached the module.
        backward_s: Duration of the backward proper: until autograd had nothing left to do.
        exposed_s: How long the step then waited for communication.
        buckets: One record a bucket, by index; with forward overlap they are launched in another order.
    """

    step: int
    forward_s: float
    started_s: float
    backward_s: float
    exposed_s: float
    buckets: tuple[BucketTiming, ...]

    @property
    def communication_s(self) -> float:
        """Time during which at least one reduction was under way."""
        busy_s, busy_until_s = 0.0, 0.0
        for bucket in sorted(self.buckets, key=lambda bucket: bucket.launched_s):
            start_s = max(bucket.launched_s, busy_until_s)
            busy_s += max(0.0, bucket.done_s - start_s)
            busy_until_s = max(busy_until_s, bucket.done_s)
        return busy_s

    @property
    def overlapped_s(self) -> float:
        """Communication that was hidden behind the backward."""
        return max(0.0, self.communication_s - self.exposed_s)


class StepTimings:
    """The last steps of one module on this rank; local, never communicates."""

    def __init__(self) -> None:
        self._steps: deque[StepTiming] = deque(maxlen=HISTORY_STEPS)

    def add(self, timing: StepTiming) -> None:
        self._steps.append(timing)

    def recent(self, num_steps: int = HISTORY_STEPS) -> tuple[StepTiming, ...]:
        """The last `num_steps` records that are kept, oldest first."""
        return tuple(self._steps)[-num_steps:] if num_steps > 0 else ()

    @property
    def last(self) -> StepTiming | None:
        return self._steps[-1] if self._steps else None

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[StepTiming]:
        return iter(tuple(self._steps))


PREFIX = "paceline:"
_UNSEEN = nullcontext()


def profiler_range(name: str) -> AbstractContextManager[object]:
    """A range `paceline:<name>` around what is done within; costs a tenth of a microsecond where no profiler runs."""
    return record_function(PREFIX + name) if _profiler_enabled() else _UNSEEN
