"""One record a synchronized step: when each bucket was ready, launched and done, and how long the step waited.

And ranges in torch's profiler for the stations of a gradient's way, named as the fields of these records.

All times are host times of `time.perf_counter()`, in seconds. On an accelerator "done" is when the host had
finished waiting, which is not when the device finished.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median

from torch.autograd import _profiler_enabled
from torch.autograd.profiler import record_function
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

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
        forward_s: Duration of the forwards of its micro-steps, all together.
        started_s: When backward reached the module.
        backward_s: Duration of the backward proper: until autograd had nothing left to do.
        exposed_s: How long the step then waited for communication.
        buckets: One record a bucket, by index; with forward overlap they are launched in another order.
        num_micro_steps: Forwards that were differentiated since the synchronized backward before.
        last_forward_s: Duration of the last of them.
        earlier_backward_s: Duration of the backwards of earlier micro-steps, which did not synchronize.
        optimizer_s: In optimizers between the step before and this one; 0 also where torch runs no optimizer hooks.
        other_s: Between the step before and this one besides: loading, losses, evaluation; 0 in the first step.
    """

    step: int
    forward_s: float
    started_s: float
    backward_s: float
    exposed_s: float
    buckets: tuple[BucketTiming, ...]
    num_micro_steps: int = 1
    last_forward_s: float = 0.0
    earlier_backward_s: float = 0.0
    optimizer_s: float = 0.0
    other_s: float = 0.0

    @property
    def parts_s(self) -> dict[str, float]:
        """Where its time went; the parts add up to it. What forward overlap waits for is in the next forward, too."""
        return {
            "forward": self.forward_s,
            "backward": self.earlier_backward_s + self.backward_s,
            "waiting for gradients": self.exposed_s,
            "optimizer": self.optimizer_s,
            "loading and the rest": self.other_s,
        }

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


@dataclass(frozen=True)
class BeforeBackward:
    """What a step had done when its synchronized backward began; fields as `StepTiming`'s."""

    forward_s: float
    num_micro_steps: int
    last_forward_s: float
    earlier_backward_s: float
    optimizer_s: float
    other_s: float


class _Optimizers:
    """Seconds that this process has spent in steps of optimizers, by torch's hooks for all of them."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._began_s: float | None = None
        self._is_watched = False

    def watch(self) -> None:
        """Count from now on. May be called often."""
        if not self._is_watched:
            self._is_watched = True
            register_optimizer_step_pre_hook(self._begin)
            register_optimizer_step_post_hook(self._end)

    def _begin(self, *_: object) -> None:
        self._began_s = time.perf_counter()

    def _end(self, *_: object) -> None:
        if self._began_s is not None:  # an optimizer around another one has ended with the inner one's time
            self.spent_s += time.perf_counter() - self._began_s
            self._began_s = None


_optimizers = _Optimizers()


def watches_optimizers(hook: object) -> bool:
    """Whether one of torch's hooks for all optimizers is the clock here, which needs no whole step."""
    return getattr(hook, "__self__", None) is _optimizers


class StepTimings:
    """The last steps of one module on this rank; local, never communicates. Printed, they are a table."""

    def __init__(self) -> None:
        self._steps: deque[StepTiming] = deque(maxlen=HISTORY_STEPS)
        self._returned_s: float | None = None  # when the last synchronized backward was left
        self._optimizers_before_s = 0.0
        self._forget_micro_steps()
        _optimizers.watch()

    def _forget_micro_steps(self) -> None:
        self._num_forwards = 0
        self._forward_s = self._last_forward_s = self._earlier_backward_s = 0.0

    def note_forward(self, forward_s: float) -> None:
        """A forward that will be differentiated took so long."""
        self._num_forwards += 1
        self._forward_s += forward_s
        self._last_forward_s = forward_s

    def note_earlier_backward(self, backward_s: float) -> None:
        """A backward of a micro-step that does not synchronize took so long."""
        self._earlier_backward_s += backward_s

    def before(self, started_s: float) -> BeforeBackward:
        """What was done before the synchronized backward that began then."""
        optimizer_s = other_s = 0.0
        if self._returned_s is not None:
            optimizer_s = _optimizers.spent_s - self._optimizers_before_s
            busy_s = self._forward_s + self._earlier_backward_s + optimizer_s
            other_s = max(0.0, started_s - self._returned_s - busy_s)
        return BeforeBackward(
            self._forward_s,
            max(1, self._num_forwards),
            self._last_forward_s,
            self._earlier_backward_s,
            optimizer_s,
            other_s,
        )

    def leave(self) -> None:
        """A synchronized backward is left: the next step begins."""
        self._returned_s = time.perf_counter()
        self._optimizers_before_s = _optimizers.spent_s
        self._forget_micro_steps()

    def table(self, num_steps: int = HISTORY_STEPS) -> str:
        """Where the time of the last `num_steps` went, in words: of each part the median, the most and its share."""
        steps = self.recent(num_steps)
        if not steps:
            return "no step has been synchronized yet"
        first, last = steps[0].step, steps[-1].step
        title = (
            f"where the time of a step goes: step {last}"
            if len(steps) == 1
            else (f"where the time of a step goes: steps {first} to {last}")
        )
        if steps[-1].num_micro_steps > 1:
            title += f", of {steps[-1].num_micro_steps} micro-steps"
        rows = {name: [step.parts_s[name] for step in steps] for name in steps[0].parts_s}
        rows["step"] = [sum(step.parts_s.values()) for step in steps]
        total_s = sum(rows["step"]) or 1.0
        hidden_s = [step.overlapped_s for step in steps]
        lines = [title, f"{'':24}{'median ms':>12}{'longest ms':>12}{'share':>8}"]
        lines += [
            f"{name:24}{1e3 * median(row):12.2f}{1e3 * max(row):12.2f}{sum(row) / total_s:8.0%}"
            for name, row in rows.items()
        ]
        lines.append(f"{'hidden communication':24}{1e3 * median(hidden_s):12.2f}{1e3 * max(hidden_s):12.2f}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

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
