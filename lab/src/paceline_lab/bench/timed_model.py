"""A model whose layers sleep instead of computing: real gradients, real hooks, real traffic, and no core taken.

More ranks than cores cannot compute at the same time, but they can wait at the same time. So every layer sleeps as
long as a profile says, and its backward returns gradients of the real shapes, layer by layer, as autograd would.

Rules
1. What a sleep took too long is taken off the next one: the sum is the profile's, to within one sleep's error.
2. A gradient is a window of one small table: rank-dependent, different at every place, known in advance on all
   ranks, and cheap: autograd's own copy of it only writes. Its elements are multiples of 1/256 below 4, so
   sums over up to 2,048 ranks are exact in any order.
3. Parameters are never read or written: their memory exists in name only. The optimizer sleeps as well.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.errors import ConfigurationError
from paceline_lab.bench.layer_profile import Profile, Shape
from paceline_lab.workloads import Workload, make_workload
from paceline_plan import LayerTimes, RecordedWorkload

_STEP = 1 / 256  # between two values of a gradient
_PRIME = 7919  # how far apart the windows of neighbouring parameters begin


class Stopwatch:
    """Spends time so that the sum is right, though no sleep is exact."""

    def __init__(
        self, sleep: Callable[[float], None] = time.sleep, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._sleep, self._now = sleep, now
        self.debt_s = 0.0  # slept too long so far

    def spend(self, length_s: float) -> None:
        """Let `length_s` pass, less what the last sleeps took too long."""
        wanted_s = length_s - self.debt_s
        if wanted_s <= 0:
            self.debt_s = -wanted_s
            return
        start_s = self._now()
        self._sleep(wanted_s)
        self.debt_s = self._now() - start_s - wanted_s


class GradientTable:
    """Every gradient that a rank produces."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self._lengths = [_window(shape) for shape in shapes]
        self._size = max(self._lengths) + _PRIME

    def of_rank(self, rank: int) -> Tensor:
        """Return the table that the gradients of one rank are windows of."""
        generator = torch.Generator().manual_seed(rank + 1)
        return torch.randint(-1023, 1024, (self._size,), generator=generator).float() * _STEP

    def view(self, table: Tensor, index: int, shape: Shape) -> Tensor:
        """Return parameter `index`'s gradient: rows overlap, each is the last one moved by an element."""
        offset = (index * _PRIME) % (self._size - self._lengths[index] + 1)
        strides = [1] * len(shape)
        first = 0 if shape and shape[0] == 1 else 1  # a single row overlaps nothing
        for i in range(len(shape) - 2, first - 1, -1):  # all but the first as in a contiguous tensor
            strides[i] = strides[i + 1] * shape[i + 1]
        return table.as_strided(shape, strides, offset)


def _window(shape: Shape) -> int:
    return shape[0] + math.prod(shape[1:]) if shape else 1


class _Pass(torch.autograd.Function):
    """The identity on `x`, after its time; backward gives every parameter its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: TimedLayer, *_parameters: Tensor) -> Tensor:
        ctx.layer = layer
        layer.stopwatch.spend(layer.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        layer: TimedLayer = ctx.layer
        layer.stopwatch.spend(layer.backward_s)
        return gradients[0], None, *layer.gradients


class TimedLayer(nn.Module):
    """Some parameters, and the seconds that their forward and backward take."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], stopwatch: Stopwatch
    ) -> None:
        super().__init__()
        self.weights = nn.ParameterList(parameters)
        self._own = list(parameters)
        self.gradients = list(gradients)  # one a parameter; held here: autograd copies instead of taking them
        self.stopwatch = stopwatch
        self.forward_s = self.backward_s = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, later."""
        result: Tensor = _Pass.apply(x, self, *self._own)  # type: ignore[no-untyped-call]
        return result


class TimedModel(nn.Sequential):
    """A chain of layers that sleep.

    Args:
        profile: Times of the layers, and their shapes.
        rank: Rank whose gradients it has.
        scale: Divides the first size of every parameter, so about the bytes; not the times.
        stopwatch: Spends the time; in tests one that does not sleep.
    """

    def __init__(
        self, profile: Profile, rank: int, scale: float = 1.0, stopwatch: Stopwatch | None = None
    ) -> None:
        shapes = [[scaled(shape, scale) for shape in layer.shapes] for layer in profile.layers]
        flat = [shape for layer in shapes for shape in layer]
        table, stopwatch = GradientTable(flat), stopwatch or Stopwatch()
        values, layers, index = table.of_rank(rank), [], 0
        for timing, own in zip(profile.layers, shapes, strict=True):
            gradients = [table.view(values, index + i, shape) for i, shape in enumerate(own)]
            layer = TimedLayer([_untouched(shape) for shape in own], gradients, stopwatch)
            layer.forward_s, layer.backward_s = timing.forward_s, timing.backward_s
            layers.append(layer)
            index += len(own)
        super().__init__(*layers)
        self.table, self.stopwatch, self.optimizer_s = table, stopwatch, profile.optimizer_s

    def expected_error(self, gradients: Sequence[Tensor], num_ranks: int) -> float:
        """Return how far `gradients` are from the mean over all ranks, relative to its size (root mean squares)."""
        tables = torch.stack([self.table.of_rank(rank) for rank in range(num_ranks)])
        mean = tables.double().mean(0).float()  # windows of the mean are the means of windows
        wrong = right = 0.0
        for index, gradient in enumerate(gradients):
            wanted = self.table.view(mean, index, tuple(gradient.shape))
            wrong += float((gradient - wanted).double().square().sum())
            right += float(wanted.double().square().sum())
        return math.sqrt(wrong / right) if right else math.sqrt(wrong)


class SleepingOptimizer(torch.optim.Optimizer):
    """Takes time, changes nothing."""

    def __init__(self, parameters: Iterable[nn.Parameter], step_s: float) -> None:
        super().__init__(parameters, {})
        self.step_s = step_s

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        time.sleep(self.step_s)


@dataclass(frozen=True)
class TimedWorkload(Workload):
    """A profile as a workload.

    Attributes:
        profile: Times of the layers.
        rank: Rank whose gradients it has.
        scale: Divides the gradients' bytes (TimedModel).
    """

    profile: Profile
    rank: int
    scale: float = 1.0

    def make_model(self) -> TimedModel:
        """Return the model."""
        return TimedModel(self.profile, self.rank, self.scale)

    def make_batch(self, rank: int, step: int) -> Tensor:
        """Return a number; nothing depends on it."""
        return torch.zeros(1, requires_grad=True)

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> SleepingOptimizer:
        """Return an optimizer whose step sleeps as long as the profile's optimizer takes."""
        return SleepingOptimizer(parameters, self.profile.optimizer_s)

    def loss(self, model: nn.Module, batch: Tensor, carry: None) -> tuple[Tensor, None]:
        """Pass all layers."""
        return model(batch).sum(), None

    def answer(self, model: nn.Module) -> list[Tensor]:
        """Return the gradients: the parameters never change."""
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def scaled(shape: Shape, scale: float) -> Shape:
    """Return `shape` with its first size divided by `scale`, rounded up."""
    if not scale >= 1 or scale == float("inf"):
        raise ConfigurationError(f"--scale {scale} cannot divide a model. Pass 1 or more.")
    return (math.ceil(shape[0] / scale), *shape[1:]) if shape else shape


def gradient_bytes(profile: Profile, scale: float = 1.0) -> int:
    """Return the float32 bytes of all gradients."""
    return sum(4 * math.prod(scaled(shape, scale)) for layer in profile.layers for shape in layer.shapes)


def workload_bytes(name: str, profile: Profile | None, scale: float, *, quick: bool) -> int:
    """Return the float32 bytes of all gradients of a profile; without one, of the workload of this name."""
    if profile is not None:
        return gradient_bytes(profile, scale)
    with torch.device("meta"):
        model = make_workload(name, quick).make_model()
    return sum(4 * parameter.numel() for parameter in model.parameters())


def planned(profile: Profile, scale: float = 1.0) -> RecordedWorkload:
    """Return the simulator's input: the profile's times, and float32 bytes divided by `scale`."""
    return RecordedWorkload(
        profile.workload,
        profile.source,
        tuple(
            LayerTimes(
                layer.name,
                layer.forward_s,
                layer.backward_s,
                tuple(4 * math.prod(scaled(shape, scale)) for shape in layer.shapes),
            )
            for layer in profile.layers
        ),
        profile.optimizer_s,
    )


def _untouched(shape: Shape) -> nn.Parameter:
    """Return a parameter of zeros that takes no memory, since the kernel allocates a page at its first write."""
    return nn.Parameter(torch.from_numpy(np.zeros(shape, dtype=np.float32)))
