"""What does a reduction cost here? Timed on real gradients, on all ranks at once, behind a step's last bucket."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from paceline.comm.pending import Pending
from paceline.comm.traffic import Traffic
from paceline.observe import StepTiming
from paceline.planning import Line, ReductionCost
from paceline.reductions.lossy import Lossy
from paceline.reductions.reduction import Message, Reduction, real_numel

NUM_TIMES = 3
LARGE_SHARE = (
    8  # a probe's message is an eighth of all gradients, within the following bounds; one gradient at least
)
LEAST_BYTES, MOST_BYTES = 2**18, 2**22

Wait = Generator[Pending, None, None]


def _prefix(message: Message, limit_bytes: float) -> Message:
    """A copy of a message's first gradients, as many as fit, and at least one; without the words behind them."""
    num_bytes, num_kept = 0, 0
    for gradient in message.gradients:
        num_bytes += gradient.numel() * gradient.element_size()
        if num_kept and num_bytes > limit_bytes:
            break
        num_kept += 1
    return _copy(message, num_kept)


def _smallest(message: Message) -> Message:
    """A copy of the message cut down to its smallest gradient that is not empty."""
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
    """The gradient's piece of its flat buffer."""
    real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return real.as_strided((real.numel(),), (1,), real.storage_offset())


def _copy(message: Message, num_gradients: int) -> Message:
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
    """Seconds of one reduction of one message: launch, wire, finish, processors; one entry a repetition."""

    launch_s: list[float] = field(default_factory=list)
    wire_s: list[float] = field(default_factory=list)
    finish_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def shortest(self) -> list[float]:
        """Of each, the shortest: what disturbs only adds."""
        return [min(times) for times in (self.launch_s, self.wire_s, self.finish_s, self.cpu_s)]


_NUM_LINES = 4
_NUM_NUMBERS = 2 * _NUM_LINES + 1


class Probe:
    """Times reductions of a large and a small message.

    Args:
        large: A copy of real gradients, not yet reduced.
        small: A copy of fewer of them.
        reductions: What is timed, by name; the first is the mean that the others are compared with. They keep what they
            learn here, so they are not those that reduce the steps.
        num_ranks: Whose gradients are averaged.
        scale: What the gradients have been multiplied by already.
    """

    def __init__(
        self,
        large: Message,
        small: Message,
        reductions: Mapping[str, Reduction],
        num_ranks: int,
        scale: float,
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
        """One with copies of a part of a bucket, which is about to be reduced, of a model with so many gradients."""
        large = _prefix(message, min(max(total_bytes / LARGE_SHARE, LEAST_BYTES), MOST_BYTES))
        return cls(large, _smallest(large), reductions, num_ranks, scale)

    def run(self) -> Wait:
        """Launch and wait, one after another. Collective: every rank, at the same place."""
        for _ in range(NUM_TIMES):
            for name, reduction in self._reductions.items():
                for message, times in zip(self._messages, self._times[name], strict=True):
                    reduction.begin_step()
                    rescaled = _fresh(message, reduction.input_scale(self._num_ranks) / self._scale)
                    yield from self._time(name, reduction, rescaled, times)

    def _time(self, name: str, reduction: Reduction, message: Message, times: _Times) -> Wait:
        _synchronize(message.flat)
        arrived: list[float] = []
        cpu_s, start_s = time.process_time(), time.perf_counter()
        pending = reduction.launch(message)
        launched_s = time.perf_counter()
        pending.on_done(_noting(arrived))
        yield pending
        _synchronize(message.flat)
        end_s = time.perf_counter()
        arrived_s = min(max(arrived[0], launched_s), end_s) if arrived and not message.flat.is_cuda else end_s
        times.launch_s.append(launched_s - start_s)
        times.wire_s.append(arrived_s - launched_s)
        times.finish_s.append(end_s - arrived_s)
        times.cpu_s.append(time.process_time() - cpu_s)
        reduction.end_step(StepTiming(0, 0.0, start_s, 0.0, end_s - start_s, buckets=()))
        if message.flat.numel() == self._messages[0].flat.numel():
            self._results.setdefault(name, message.flat)

    def numbers(self) -> list[float]:
        """What this rank has seen: times of each reduction, large then small, and its error. As many on every rank."""
        exact = next(iter(self._results.values())).double()
        size = exact.norm().item()
        numbers = []
        for name, both in self._times.items():
            error = (self._results[name].double() - exact).norm().item() / size if size else 0.0
            numbers += [*both[0].shortest(), *both[1].shortest(), error]
        return numbers

    def costs(self, numbers: Sequence[float], busy_ratio: float) -> tuple[ReductionCost, list[ReductionCost]]:
        """Read what the ranks have agreed on, in the form of `numbers`: the cost of the first, and of the others.

        Args:
            numbers: Agreed on.
            busy_ratio: The share of the processors that computing keeps busy.
        """
        readings = [
            (name, self._lines(numbers[_NUM_NUMBERS * place :]), self._payload_ratio(reduction))
            for place, (name, reduction) in enumerate(self._reductions.items())
        ]
        name, lines, _ = readings[0]
        plain = ReductionCost(name, *lines, link_s_per_byte=lines[1].s_per_byte)
        codecs = []
        for name, lines, payload_ratio in readings[1:]:
            cost = ReductionCost.of_codec(name, plain, lines, payload_ratio, busy_ratio)
            carries_words = self._reductions[name].carries_words
            codecs.append(replace(cost, closing_s=0.0 if carries_words else plain.wire.fixed_s))
        return plain, codecs

    def _lines(self, numbers: Sequence[float]) -> tuple[Line, Line, Line, Line]:
        large, small = (message.flat.numel() * message.flat.element_size() for message in self._messages)
        launch, wire, finish, cpu = (
            Line.through((small, numbers[_NUM_LINES + i]), (large, numbers[i])) for i in range(_NUM_LINES)
        )
        return launch, wire, finish, cpu

    @staticmethod
    def _payload_ratio(reduction: Reduction) -> float:
        traffic = traffic_of(reduction)
        return (
            traffic.sent_bytes / traffic.plain_bytes if traffic is not None and traffic.plain_bytes else 1.0
        )

    def errors(self, numbers: Sequence[float]) -> dict[str, float]:
        """Each codec's error, relative to the size of the mean that it stands for."""
        agreed = numbers[_NUM_NUMBERS - 1 :: _NUM_NUMBERS]
        return dict(list(zip(self._reductions, agreed, strict=True))[1:])


def traffic_of(reduction: Reduction) -> Traffic | None:
    """What the reduction's last step sent; None where it does not say."""
    return reduction.last_step if isinstance(reduction, Lossy) else None


def _fresh(message: Message, scale: float) -> Message:
    copied = _copy(message, len(message.gradients))
    if scale != 1.0:
        copied.flat.mul_(scale)
    return copied


def _noting(arrived: list[float]) -> Callable[[], None]:
    return lambda: arrived.append(time.perf_counter())


def _synchronize(tensor: Any) -> None:
    """An accelerator computes later than it is told to."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
