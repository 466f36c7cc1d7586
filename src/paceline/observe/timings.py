"""One record per synchronized step: when each bucket was ready, launched and done, and how long the step waited.

The stations of a gradient's way are also ranges in torch's profiler, named as the fields of these records.

All times are those of `time.perf_counter()`, in seconds. On an accelerator those of backward, of its buckets and of the
waiting are the device's, as soon as it has come past them (`StepTimings.settle`). Until then they are host times: when
the device was told. Those of the forward, the optimizer and the rest stay so.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median

from torch.autograd import _profiler_enabled
from torch.autograd.profiler import record_function
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.observe import spans
from paceline.observe.device_times import DeviceTimes
from paceline.observe.run_records import BucketTiming

HISTORY_STEPS = 256


@dataclass(frozen=True)
class StepTiming:
    """One synchronized backward and the forward before it.

    Attributes:
        step: Counts synchronized backwards of this module, from 1.
        forward_s: Duration of the forwards of its micro-steps, all together, less `exposed_s` of the step before that
            forward overlap has moved into them.
        started_s: When backward reached the module.
        backward_s: Duration of the backward proper: until autograd had nothing left to do.
        exposed_s: How long the step then waited for communication.
        buckets: One record a bucket, by index; with forward overlap they are launched in another order.
        num_micro_steps: Forwards that were differentiated since the synchronized backward before.
        last_forward_s: Duration of the last of them, with all waiting.
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
        """Return the time of each part of the step; they add up to it."""
        return {
            "forward": self.forward_s,
            "backward": self.earlier_backward_s + self.backward_s,
            "waiting for gradients": self.exposed_s,
            "optimizer": self.optimizer_s,
            "loading and the rest": self.other_s,
        }

    @property
    def communication_s(self) -> float:
        """Return the time during which at least one reduction was under way."""
        busy_s, busy_until_s = 0.0, 0.0
        for bucket in sorted(self.buckets, key=lambda bucket: bucket.launched_s):
            start_s = max(bucket.launched_s, busy_until_s)
            busy_s += max(0.0, bucket.done_s - start_s)
            busy_until_s = max(busy_until_s, bucket.done_s)
        return busy_s

    @property
    def overlapped_s(self) -> float:
        """Return the communication that was hidden behind the backward."""
        return max(0.0, self.communication_s - self.exposed_s)


class _Optimizers:
    """The seconds that this process has spent in steps of optimizers, by torch's hooks for all optimizers."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._began_s: float | None = None
        self._is_watched = False

    def watch(self) -> None:
        """Count optimizer steps from now on. May be called often."""
        if not self._is_watched:
            self._is_watched = True
            register_optimizer_step_pre_hook(self._begin)
            register_optimizer_step_post_hook(self._end)

    def _begin(self, *_: object) -> None:
        self._began_s = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """Subtract this time from the optimizer's step under way, if an optimizer steps."""
        if self._began_s is not None:
            self.spent_s -= seconds

    def _end(self, *_: object) -> None:
        if self._began_s is not None:  # an optimizer around another one has ended with the inner one's time
            ended_s = time.perf_counter()
            self.spent_s += ended_s - self._began_s
            spans.note("optimizer", self._began_s, ended_s)
            self._began_s = None


_optimizers = _Optimizers()


def watch_optimizers() -> None:
    """Note this process's optimizer steps as phases from now on: each once. May be called often."""
    _optimizers.watch()


def watches_optimizers(hook: object) -> bool:
    """Return whether one of torch's hooks for all optimizers is the clock here, which needs no whole step."""
    return getattr(hook, "__self__", None) is _optimizers


class StepTimes:
    """The times of one step while it is under way: durations of its forwards, earlier backwards and waits.

    Attributes:
        started_s: When its synchronized backward began; 0 before that has ended.
        last_gradient_s: When this rank's own last gradient was there.
        last_forward_s: Duration of its last forward; 0 if it has none.
        timing: Its record, once all gradients have arrived.
    """

    started_s = last_gradient_s = last_forward_s = 0.0
    timing: StepTiming | None = None
    _num_forwards = 0
    _forward_s = _earlier_backward_s = _backward_s = _optimizer_s = _other_s = 0.0

    def __init__(self, since_s: float | None = None, optimizers_before_s: float = 0.0) -> None:
        self._since_s = since_s  # when the step before it ended; None: it is the first
        self._optimizers_before_s = optimizers_before_s  # seconds that optimizers had spent before it
        self._waits_s: list[tuple[float, float]] = []  # for gradients of the step before

    def note_forward(self, forward_s: float) -> None:
        """Note the duration of a forward that will be differentiated."""
        began_s = time.perf_counter() - forward_s
        spans.note("forward", began_s, began_s + forward_s)
        self._num_forwards += 1
        self._forward_s += forward_s - sum(
            until - since for since, until in self._waits_s if since >= began_s
        )
        self.last_forward_s = forward_s

    def note_earlier_backward(self, backward_s: float) -> None:
        """Add the duration of a micro-step's backward, which does not synchronize."""
        self._earlier_backward_s += backward_s
        ended_s = time.perf_counter()
        spans.note("backward", ended_s - backward_s, ended_s)

    def note_wait(self, since_s: float, until_s: float) -> None:
        """Note a wait for gradients of the step before, which counts as its time."""
        self._waits_s.append((since_s, until_s))
        spans.note("waiting", since_s, until_s)
        _optimizers.leave_out(until_s - since_s)

    def end_backward(self, started_s: float, ended_s: float, last_gradient_s: float) -> None:
        """Store when the synchronized backward began and ended, and compute the step's optimizer and other time."""
        self.started_s, self.last_gradient_s = started_s, last_gradient_s
        self._backward_s = ended_s - started_s
        if self._since_s is not None:
            self._optimizer_s = _optimizers.spent_s - self._optimizers_before_s
            waited_s = sum(until - since for since, until in self._waits_s)
            busy_s = self._forward_s + self._earlier_backward_s + self._optimizer_s + waited_s
            self._other_s = max(0.0, started_s - self._since_s - busy_s)

    def record(self, step: int, exposed_s: float, buckets: tuple[BucketTiming, ...]) -> StepTiming:
        """Return the record of step number `step`, whose gradients have arrived; it waited `exposed_s` for them."""
        self.timing = StepTiming(
            step=step,
            forward_s=self._forward_s,
            started_s=self.started_s,
            backward_s=self._backward_s,
            exposed_s=exposed_s,
            buckets=buckets,
            num_micro_steps=max(1, self._num_forwards),
            last_forward_s=self.last_forward_s,
            earlier_backward_s=self._earlier_backward_s,
            optimizer_s=self._optimizer_s,
            other_s=self._other_s,
        )
        return self.timing


class StepTimings:
    """The last steps of one module on this rank; local, never communicates. Printed, they are a table.

    Attributes:
        decisions: What options that decide by measuring have decided, and why: `decisions["overlap_forward"]` begins
            with "on" or "off". The same on every rank; an option that is still measuring is missing.
    """

    def __init__(self) -> None:
        self.decisions: dict[str, str] = {}
        self._steps: deque[StepTiming] = deque(maxlen=HISTORY_STEPS)
        self._unsettled: deque[tuple[int, DeviceTimes]] = deque()  # by the step's number
        self.under_way = StepTimes()
        watch_optimizers()

    def decide(self, option: str, words: str, is_told: bool) -> None:
        """Record that an option has decided by itself: on or off, and why. Tell the user once, if asked to."""
        if self.decisions.get(option) != words:
            self.decisions[option] = words
            if is_told:
                tell(option, f"{option}=True: {words}")

    def begin_step(self) -> StepTimes:
        """Return the times of the step that begins now."""
        self.under_way = StepTimes(time.perf_counter(), _optimizers.spent_s)
        return self.under_way

    def table(self, num_steps: int = HISTORY_STEPS) -> str:
        """Return where the time of the last `num_steps` went: the median, the most and the share of each part."""
        steps = self.recent(num_steps)
        if not steps:
            return "no step has been synchronized yet"
        first, last = steps[0].step, steps[-1].step
        which = f"step {last}" if len(steps) == 1 else f"steps {first} to {last}"
        title = f"where the time of a step goes: {which}"
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
        lines += [f"{option}: {words}" for option, words in self.decisions.items()]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def add(self, timing: StepTiming, marks: DeviceTimes | None = None) -> None:
        """Add a step that has ended; with `marks`, if a device performs it later."""
        self._steps.append(timing)
        if marks is not None:
            self._unsettled.append((timing.step, marks))
        while self._unsettled and self._unsettled[0][1].is_past():
            self._settle_first()

    def settle(self) -> None:
        """Wait until the device has done all steps, so that records have its times. Local; does nothing on a CPU."""
        while self._unsettled:
            self._settle_first()

    def settled_last(self) -> StepTiming:
        """Return the last step's record with the device's times, after a wait as in `settle`."""
        self.settle()
        assert self.last is not None
        return self.last

    def _settle_first(self) -> None:
        step, marks = self._unsettled.popleft()
        place = step - self._steps[0].step
        if 0 <= place < len(self._steps) and self._steps[place].step == step:
            self._steps[place] = marks.settle(self._steps[place])

    def recent(self, num_steps: int = HISTORY_STEPS) -> tuple[StepTiming, ...]:
        """Return the last `num_steps` records that are kept, oldest first."""
        return tuple(self._steps)[-num_steps:] if num_steps > 0 else ()

    @property
    def last(self) -> StepTiming | None:
        return self._steps[-1] if self._steps else None

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[StepTiming]:
        return iter(tuple(self._steps))


def tell(subject: str, text: str) -> None:
    """Say what an option has decided: to the logger `paceline.SUBJECT` if it has a handler, to stderr otherwise."""
    logger = logging.getLogger(f"paceline.{subject}")
    if logger.hasHandlers():
        logger.info(text)
    else:
        sys.stderr.write(f"paceline: {text}\n")


PREFIX = "paceline:"
_UNSEEN = nullcontext()


def profiler_range(name: str) -> AbstractContextManager[object]:
    """Record a range `paceline:<name>` in the profiler. It costs a tenth of a microsecond if no profiler runs."""
    return record_function(PREFIX + name) if _profiler_enabled() else _UNSEEN
