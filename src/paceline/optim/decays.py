"""Learning rate decays: a factor of the peak rate after the warm-up, as a function of time.

Time is in whatever unit the curve's lengths are given in: epochs, steps or samples. All functions are defined from the
end of the warm-up on; after the end of training they keep their last value.
"""

from __future__ import annotations

import bisect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import ConfigurationError


class Decay(ABC):
    """A factor of the peak rate over time. Final classes are frozen and check themselves."""

    @abstractmethod
    def factor(self, time: float, warmup: float, total: float) -> float:
        """The factor at `time`, for warmup <= time <= total; 1 when the warm-up ends, if it has one."""

    def check(self, warmup: float, total: float) -> None:  # noqa: B027  most need nothing
        """Raise a ConfigurationError if it cannot work with these lengths."""


def _check_end(end: float) -> None:
    if not 0 <= end <= 1:
        raise ConfigurationError(
            f"end={end} is not a fraction of the peak rate. Give a number from 0 to 1, such as 0.01."
        )


def _fraction(time: float, warmup: float, total: float) -> float:
    """How much of the time after the warm-up has passed."""
    return (time - warmup) / (total - warmup) if total > warmup else 0.0


@dataclass(frozen=True)
class Constant(Decay):
    """No decay."""

    def factor(self, time: float, warmup: float, total: float) -> float:
        return 1.0


@dataclass(frozen=True)
class Polynomial(Decay):
    """From 1 to `end` as (1 - x)^power, x being the part of the time after the warm-up that has passed.

    Attributes:
        power: 1 is the straight line.
        end: Fraction of the peak rate that is left at the end.
    """

    power: float = 2.0
    end: float = 0.0

    def __post_init__(self) -> None:
        if not self.power > 0:
            raise ConfigurationError(f"power={self.power} does not decay. Give a positive one; 1 is linear.")
        _check_end(self.end)

    def factor(self, time: float, warmup: float, total: float) -> float:
        left = (1.0 - _fraction(time, warmup, total)) ** self.power
        return float(self.end + (1.0 - self.end) * left)


@dataclass(frozen=True)
class Cosine(Decay):
    """From 1 to `end` along half a cosine.

    Source:
        Loshchilov and Hutter 2017, equation 5, without restarts.
    """

    end: float = 0.0

    def __post_init__(self) -> None:
        _check_end(self.end)

    def factor(self, time: float, warmup: float, total: float) -> float:
        half_wave = (1.0 + math.cos(math.pi * _fraction(time, warmup, total))) / 2.0
        return self.end + (1.0 - self.end) * half_wave


@dataclass(frozen=True)
class InverseSqrt(Decay):
    """As 1 / √time: √(timescale / time).

    Attributes:
        timescale: When the factor is 1; before it, it stays 1. None: the length of the warm-up.

    Source:
        Vaswani et al. 2017, equation 3.
    """

    timescale: float | None = None

    def __post_init__(self) -> None:
        if self.timescale is not None and not self.timescale > 0:
            raise ConfigurationError(
                f"timescale={self.timescale} is not a positive time. Leave it out for the warm-up's length."
            )

    def check(self, warmup: float, total: float) -> None:
        if self.timescale is None and warmup == 0:
            raise ConfigurationError(
                "the sqrt decay falls as √(warmup / time), but warmup=0. Give the curve a warm-up, or "
                "decay=InverseSqrt(timescale=...), the time at which the rate begins to fall."
            )

    def factor(self, time: float, warmup: float, total: float) -> float:
        timescale = warmup if self.timescale is None else self.timescale
        return math.sqrt(timescale / time) if time > timescale else 1.0


@dataclass(frozen=True)
class Step(Decay):
    """Divided by `divisor` at each milestone.

    Attributes:
        milestones: Times, counted from the start of training (not from the end of the warm-up), ascending. None: 30,
            60 and 80 ninetieths of the total, as for ImageNet.
        divisor: By how much.

    Source:
        Goyal et al. 2017, section 5.1.
    """

    milestones: tuple[float, ...] | None = None
    divisor: float = 10.0

    def __post_init__(self) -> None:
        times = self.milestones
        if times is not None and (list(times) != sorted(set(times)) or any(time <= 0 for time in times)):
            raise ConfigurationError(
                f"milestones={times} are not positive and ascending. Give each time once, in order."
            )
        if not self.divisor > 0:
            raise ConfigurationError(f"divisor={self.divisor} is not positive. The usual one is 10.")

    def check(self, warmup: float, total: float) -> None:
        times = self._times(total)
        if times and not warmup <= times[0] <= times[-1] < total:
            raise ConfigurationError(
                f"the milestones {', '.join(f'{time:g}' for time in times)} do not all lie between the end of the "
                f"warm-up ({warmup:g}) and the end of training ({total:g}). They have the unit of the curve's total "
                "and count from the start; give Step(milestones=...) others, or shorten the warm-up."
            )

    def factor(self, time: float, warmup: float, total: float) -> float:
        return 1.0 / self.divisor ** bisect.bisect_right(self._times(total), time)

    def _times(self, total: float) -> tuple[float, ...]:
        if self.milestones is None:
            return tuple(total * ninetieths / 90 for ninetieths in (30, 60, 80))
        return self.milestones


DECAYS: dict[str, Callable[[], Decay]] = {
    "none": Constant,
    "linear": lambda: Polynomial(power=1.0),
    "sqrt": InverseSqrt,
    "step": Step,
    "cosine": Cosine,
    "polynomial": Polynomial,
}


def choose_decay(decay: Decay | str) -> Decay:
    """Return the decay of that name with its defaults, or the one given.

    Raises:
        ConfigurationError: There is none of that name.
    """
    if isinstance(decay, Decay):
        return decay
    if not isinstance(decay, str) or decay not in DECAYS:
        raise ConfigurationError(
            f"decay={decay!r} is not a curve. Give one of {', '.join(map(repr, DECAYS))} or a paceline.optim.Decay, "
            "such as Step(milestones=(30, 60))."
        )
    return DECAYS[decay]()
