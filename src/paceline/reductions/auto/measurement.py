"""What `compression="auto"` measures on a rank: steps (`Stopwatch`, `Periods`), and reductions one by one (`Probe`)."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from paceline.comm.collectives import Work
from paceline.comm.device import wait_for_all
from paceline.comm.traffic import Traffic
from paceline.observe import StepTiming
from paceline.planning import AlphaBetaCost, BucketLoad, ReductionCost, StepProfile
from paceline.reductions.lossy import Lossy
from paceline.reductions.reduction import Message, Reduction, StepEnd, real_numel

NUM_TIMES = 3  # each reduction of each message is timed
# a probe's large message is about an eighth of all gradients, within these bounds; whole gradients
LARGE_SHARE = 8
LEAST_BYTES, MOST_BYTES = 2**18, 2**22

_NUM_LINES = 4  # launch, wire, finish, processor time
_NUM_NUMBERS = 2 * _NUM_LINES + 1

Wait = Generator[Work, None, None]


class Stopwatch:
    """Measures a step from the end of the one before to its own end, and when its buckets were ready in between."""

    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,  # the clock of `StepTiming`, in seconds
        # The clock of this process's processor time, in seconds
        cpu: Callable[[], float] = time.process_time,
        # The host's processors, divided by its ranks; by default from LOCAL_WORLD_SIZE.
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
        """Bucket `index`, of `size_bytes`, has been launched; launching began at `since_s`."""
        self._launch_s[index] = self._now() - since_s
        self._sizes[index] = size_bytes

    def abandon(self) -> None:
        """A step failed: the duration of the next one is unknown."""
        self._ended_s = None

    def end_step(self, timing: StepTiming) -> tuple[float, StepProfile] | None:
        """The step's duration in seconds and its profile; None for the first, and for local steps."""
        before_s, self._ended_s = self._ended_s, self._now()
        cpu_before_s, self._cpu_s = self._cpu_s, self._cpu()
        if before_s is None or not timing.buckets:
            return None
        computed_s = timing.started_s + timing.backward_s
        late_s, loads = 0.0, []
        end_s = computed_s
        for bucket in timing.buckets:
            if bucket.index not in self._launch_s:
                continue  # a sparse one, which no codec compresses
            loads.append(BucketLoad(bucket.launched_s - late_s - before_s, self._sizes[bucket.index]))
            late_s += self._launch_s[bucket.index]
            if bucket.launched_s < computed_s:
                end_s -= self._launch_s[bucket.index]
        period_s = self._ended_s - before_s
        busy_ratio = min((self._cpu_s - cpu_before_s) / period_s / self._num_processors, 1.0)
        return period_s, StepProfile(end_s - before_s, tuple(loads), busy_ratio)


def _processors_a_rank() -> float:
    """The processors of this host, divided by the ranks that the launcher started on it."""
    return len(os.sched_getaffinity(0)) / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def median_profile(profiles: Sequence[StepProfile]) -> list[float]:
    """Medians over steps with equal buckets: [busy processors' ratio, end of backward, each bucket's ready time]."""
    ready = zip(*[[bucket.ready_s for bucket in profile.buckets] for profile in profiles], strict=True)
    return [
        statistics.median(profile.busy_ratio for profile in profiles),
        statistics.median(profile.backward_end_s for profile in profiles),
        *map(statistics.median, ready),
    ]


def profile_of(numbers: Sequence[float], sizes_bytes: Sequence[int]) -> StepProfile:
    """The profile of numbers as `median_profile` returns them, and the buckets' sizes."""
    busy_ratio, backward_end_s, *ready_s = numbers
    return StepProfile(backward_end_s, tuple(map(BucketLoad, ready_s, sizes_bytes)), busy_ratio)


class Periods:
    """The durations of recent steps, by codec; None stands for none."""

    def __init__(self) -> None:
        self._periods_s: dict[str | None, list[float]] = {}

    def add(self, codec: str | None, period_s: float) -> None:
        self._periods_s.setdefault(codec, []).append(period_s)

    def medians(self, codecs: Sequence[str | None]) -> list[float]:
        """The median duration of each codec's steps, in seconds; 0 for one that had none."""
        return [statistics.median(self._periods_s.get(codec) or [0.0]) for codec in codecs]

    def comparison(self, codec: str | None, other: str | None) -> list[float]:
        """The duration of steps with `codec`, that with `other`, in seconds, and the standard error of their ratio.

        Their ratio is the median over pairs of neighbouring steps: what other programs slow down for a while is both.
        """
        both = [self._periods_s.get(name, []) for name in (codec, other)]
        ratios = [one_s / other_s for one_s, other_s in zip(*both, strict=False)]
        if not ratios:
            return [0.0, 0.0, math.inf]
        other_s = statistics.median(both[1])
        return [statistics.median(ratios) * other_s, other_s, _error_of_median(ratios)]

    def clear(self) -> None:
        self._periods_s = {}


def _error_of_median(values: Sequence[float]) -> float:
    """The standard error of a median, relative to it; by the median of absolute deviations, as few steps are long."""
    middle = statistics.median(values)
    spread = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return math.sqrt(math.pi / 2 / len(values)) * spread / middle


def _prefix(message: Message, wanted_bytes: float) -> Message:
    """A copy of a message's first gradients, as many as come nearest to `wanted_bytes`; without status words.

    Nearest in proportion: a bias before a large matrix would say nothing about the matrix.
    """
    sizes = [gradient.numel() * gradient.element_size() for gradient in message.gradients]
    away = [abs(math.log(max(size, 1) / wanted_bytes)) for size in itertools.accumulate(sizes)]
    return _copy(message, away.index(min(away)) + 1)


def _smallest(message: Message) -> Message:
    """A copy of a message's smallest gradient that is not empty, as a message."""
    sizes = [gradient.numel() or float("inf") for gradient in message.gradients]
    place = sizes.index(min(sizes))
    alone = replace(
        message,
        flat=_real(message.gradients[place]),
        gradients=message.gradients[place : place + 1],
        parameters=message.parameters[place : place + 1],
    )
    return _copy(alone, 1)


def _real(gradient: Tensor) -> Tensor:
    """The gradient's part of its flat buffer, shape (real elements,)."""
    real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return real.as_strided((real.numel(),), (1,), real.storage_offset())


def _copy(message: Message, num_gradients: int) -> Message:
    """A copy of a message's first gradients, with views like its own."""
    gradients = message.gradients[:num_gradients]
    start = message.flat.storage_offset()
    num_elements = sum(map(real_numel, gradients))
    flat = message.flat[:num_elements].clone()
    storage, views = flat.untyped_storage(), []
    for gradient in gradients:
        offset = _real(gradient).storage_offset() - start
        place = offset // 2 if gradient.is_complex() else offset
        alias = torch.empty(0, dtype=gradient.dtype, device=gradient.device)
        views.append(alias.set_(storage, place, gradient.shape, gradient.stride()))
    return replace(
        message,
        is_last=False,
        flat=flat,
        num_gradient_elements=num_elements,
        gradients=views,
        parameters=message.parameters[:num_gradients],
    )


@dataclass
class _Times:
    """Seconds of one reduction of one message: launch, wire, finish, processor time; one entry for each repetition."""

    launch_s: list[float] = field(default_factory=list)
    wire_s: list[float] = field(default_factory=list)
    finish_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def shortest(self) -> list[float]:
        """The shortest of each: disturbances only add time."""
        return [min(times) for times in (self.launch_s, self.wire_s, self.finish_s, self.cpu_s)]


class Probe:
    """Times reductions of a large and a small message, on all ranks at once, after a step's last bucket."""

    def __init__(
        self,
        large: Message,  # a copy of gradients of this step, not yet reduced
        small: Message,  # a copy of fewer of them
        # Those to be timed, by name; the first is the mean that the others are compared with. Not those that reduce
        # the steps: these change their residuals.
        reductions: Mapping[str, Reduction],
        num_ranks: int,  # how many ranks' gradients are averaged
        scale: float,  # the factor by which the gradients were multiplied already
    ) -> None:
        self._messages = (large, small)
        self._reductions = reductions
        self._num_ranks, self._scale = num_ranks, scale
        self._results: dict[str, Tensor] = {}
        self._times = {name: (_Times(), _Times()) for name in reductions}

    @classmethod
    def of(
        cls,
        message: Message,
        total_bytes: int,
        reductions: Mapping[str, Reduction],
        num_ranks: int,
        scale: float,
    ) -> Probe:
        """A probe of copies of a part of `message`, not yet reduced, of a model whose gradients have `total_bytes`."""
        large = _prefix(message, min(max(total_bytes / LARGE_SHARE, LEAST_BYTES), MOST_BYTES))
        return cls(large, _smallest(large), reductions, num_ranks, scale)

    def run(self) -> Wait:
        """Reduce all messages by all reductions, one after another; yields what to wait for. Collective: every rank."""
        for _ in range(NUM_TIMES):
            for name, reduction in self._reductions.items():
                for message, times in zip(self._messages, self._times[name], strict=True):
                    scale = reduction.begin_step(self._num_ranks)
                    rescaled = _scaled_copy(message, scale / self._scale)
                    yield from self._time(name, reduction, rescaled, times)

    def _time(self, name: str, reduction: Reduction, message: Message, times: _Times) -> Wait:
        wait_for_all(message.flat.device)
        arrived: list[float] = []
        cpu_s, start_s = time.process_time(), time.perf_counter()
        pending = reduction.launch(message)
        launched_s = time.perf_counter()
        pending.on_done(_noting(arrived))
        yield pending
        wait_for_all(message.flat.device)
        end_s = time.perf_counter()
        arrived_s = min(max(arrived[0], launched_s), end_s) if arrived and message.flat.is_cpu else end_s
        times.launch_s.append(launched_s - start_s)
        times.wire_s.append(arrived_s - launched_s)
        times.finish_s.append(end_s - arrived_s)
        times.cpu_s.append(time.process_time() - cpu_s)
        reduction.end_step(StepEnd(StepTiming(0, 0.0, start_s, 0.0, end_s - start_s, buckets=())))
        if message.flat.numel() == self._messages[0].flat.numel():
            self._results.setdefault(name, message.flat)

    def numbers(self) -> list[float]:
        """This rank's measurements: of each reduction the times, large then small, and the error."""
        exact = next(iter(self._results.values())).double()
        size = exact.norm().item()
        numbers = []
        for name, both in self._times.items():
            error = (self._results[name].double() - exact).norm().item() / size if size else 0.0
            numbers += [*both[0].shortest(), *both[1].shortest(), error]
        return numbers

    def costs(
        self, numbers: Sequence[float], busy_ratio: float, payload_ratios: Mapping[str, float]
    ) -> tuple[ReductionCost, list[ReductionCost]]:
        """The cost of the first reduction and those of the others, by the ranks' largest `numbers`.

        Computing keeps the fraction `busy_ratio` of the processors busy. `payload_ratios` are of all gradients.
        """
        is_on_host = self._messages[0].flat.device.type == "cpu"
        readings = [
            (name, self._lines(numbers[_NUM_NUMBERS * place :]), self._payload_ratio(reduction))
            for place, (name, reduction) in enumerate(self._reductions.items())
        ]
        name, lines, _ = readings[0]
        plain = ReductionCost(name, *lines, link_s_per_byte=lines[1].s_per_byte)
        codecs = []
        for name, lines, payload_ratio in readings[1:]:
            cost = ReductionCost.of_codec(
                name, plain, lines, payload_ratios.get(name), payload_ratio, busy_ratio, is_on_host
            )
            carries_status = self._reductions[name].carries_status
            codecs.append(replace(cost, closing_s=0.0 if carries_status else plain.wire.fixed_s))
        return plain, codecs

    def _lines(
        self, numbers: Sequence[float]
    ) -> tuple[AlphaBetaCost, AlphaBetaCost, AlphaBetaCost, AlphaBetaCost]:
        large, small = (message.flat.numel() * message.flat.element_size() for message in self._messages)
        launch, wire, finish, cpu = (
            AlphaBetaCost.through((small, numbers[_NUM_LINES + i]), (large, numbers[i]))
            for i in range(_NUM_LINES)
        )
        return launch, wire, finish, cpu

    @staticmethod
    def _payload_ratio(reduction: Reduction) -> float:
        traffic = traffic_of(reduction)
        return (
            traffic.sent_bytes / traffic.plain_bytes if traffic is not None and traffic.plain_bytes else 1.0
        )

    def errors(self, numbers: Sequence[float]) -> dict[str, float]:
        """The norm of each codec's error, relative to that of the exact mean."""
        agreed = numbers[_NUM_NUMBERS - 1 :: _NUM_NUMBERS]
        return dict(list(zip(self._reductions, agreed, strict=True))[1:])


def traffic_of(reduction: Reduction) -> Traffic | None:
    """The traffic of the reduction's last step; None if it does not compress."""
    return reduction.last_step if isinstance(reduction, Lossy) else None


def payload_ratios(reductions: Mapping[str, Reduction], messages: Sequence[Message]) -> dict[str, float]:
    """The bytes that each reduction sends for these buckets, relative to those of an all-reduce; by shapes alone."""
    ratios = {}
    for name, reduction in reductions.items():
        if isinstance(reduction, Lossy):
            traffic = sum((reduction.traffic_of(message) for message in messages), Traffic())
            ratios[name] = traffic.sent_bytes / max(traffic.plain_bytes, 1)
    return ratios


def _scaled_copy(message: Message, scale: float) -> Message:
    copied = _copy(message, len(message.gradients))
    if scale != 1.0:
        copied.flat.mul_(scale)
    return copied


def _noting(arrived: list[float]) -> Callable[[], None]:
    return lambda: arrived.append(time.perf_counter())
