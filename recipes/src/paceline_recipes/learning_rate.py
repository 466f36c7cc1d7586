"""The learning rate: how it follows the batch, how it moves over time, and what momentum needs when it changes.

Times have one unit, the caller's: epochs, steps or samples. Decays are factors of the peak rate from the end of the
warm-up on; after the end of training they keep their last value.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import ConfigurationError
from paceline.given import number

SCALING_RULES: dict[str, Callable[[float], float]] = {
    "linear": lambda ratio: ratio,
    "sqrt": math.sqrt,
    "none": lambda _: 1.0,
}
WARMUPS = ("gradual", "constant", "none")

# In each group: the rate of its last step; saved with the optimizer's state.
_CORRECTED_RATE = "momentum_correction_rate"


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigurationError(message)


def rate_factor(scaling: str, batch: int, reference_batch: int) -> float:
    """Return the factor of the reference rate for a batch of `batch` samples.

    Args:
        scaling: "linear": by the ratio of the batches, for SGD with and without momentum. "sqrt": by its square
            root, which Adam and its kin follow more closely. "none": not at all.
        batch: Samples of one step, over all ranks.
        reference_batch: Samples of one step for which the reference rate is right.

    Raises:
        ConfigurationError: There is no such rule, or a batch is not positive.

    Source:
        Goyal et al. 2017, section 2.1 (linear); Krizhevsky 2014, section 5, derives the square root.
    """
    rules = ", ".join(map(repr, SCALING_RULES))
    _require(
        scaling in SCALING_RULES, f"scaling={scaling!r} is not a rule for the rate. Give one of {rules}."
    )
    for name, size in (("batch", batch), ("reference_batch", reference_batch)):
        _require(
            0 < number(size) < math.inf,
            f"{name}={size!r} is not a positive number of samples. Give the samples of one step over all ranks.",
        )
    return SCALING_RULES[scaling](batch / reference_batch)


# A factor of the peak rate at `time`, for warmup <= time <= total: `decay(time, warmup, total)`.
Decay = Callable[[float, float, float], float]
_MILESTONES = (30 / 90, 60 / 90, 80 / 90)  # of Goyal et al.'s 90 epochs, section 5.1


def _left(time: float, warmup: float, total: float) -> float:
    return (total - time) / (total - warmup) if total > warmup else 1.0


def _steps(time: float, _warmup: float, total: float) -> float:
    return 1.0 / 10.0 ** bisect.bisect_right([part * total for part in _MILESTONES], time)


DECAYS: dict[str, Decay] = {
    "none": lambda _time, _warmup, _total: 1.0,
    "linear": _left,
    "sqrt": lambda time, warmup, _total: math.sqrt(warmup / time) if time > warmup else 1.0,
    "step": _steps,
    "cosine": lambda *times: (1.0 + math.cos(math.pi * (1.0 - _left(*times)))) / 2.0,
    "polynomial": lambda *times: _left(*times) ** 2,
}


@dataclass(frozen=True)
class Curve:
    """A learning rate over time: for `LargeMinibatch`, or as a function for torch's `LambdaLR`.

    Attributes:
        total: How long training takes.
        warmup: How long the warm-up takes, from the start of training.
        warmup_kind: "gradual": in a straight line from the reference rate to the peak. "constant": the reference
            rate, then the peak at once. "none": the peak from the start, whatever `warmup` says.
        decay: Factor of the peak after the warm-up. "linear" and "polynomial" (a square) fall to 0, "cosine" along half
            a wave, "sqrt" as √(warmup / time). "step" divides by ten after a third, two thirds and eight ninths of the
            total. A function is called with the time, the length of the warm-up and the total.

    Raises:
        ConfigurationError: A length is not possible, or a name is unknown.

    Source:
        Goyal et al. 2017, sections 2.2 and 5.1; Loshchilov and Hutter 2017, equation 5 (cosine, without restarts);
        Vaswani et al. 2017, equation 3 (sqrt).
    """

    total: float
    warmup: float = 0.0
    warmup_kind: str = "gradual"
    decay: Decay | str = "none"

    def __post_init__(self) -> None:
        _require(
            0 < number(self.total) < math.inf,
            f"total={self.total!r} is not a length of training. Give a positive number of epochs or steps.",
        )
        is_length = number(self.warmup) >= 0
        _require(is_length, f"warmup={self.warmup!r} is not a length. Give 0 for no warm-up.")
        _require(
            self.warmup <= self.total,
            f"the warm-up ({self.warmup:g}) is longer than training ({self.total:g}), so the rate would never "
            "arrive. Both have the same unit; the paper warms up for 5 of 90 epochs.",
        )
        kinds = ", ".join(map(repr, WARMUPS))
        _require(
            self.warmup_kind in WARMUPS,
            f"warmup_kind={self.warmup_kind!r} is not a warm-up. Give one of {kinds}.",
        )
        _require(
            callable(self.decay) or self.decay in DECAYS,
            f"decay={self.decay!r} is not a curve. Give one of {', '.join(map(repr, DECAYS))} or a function of the "
            "time, the length of the warm-up and the total.",
        )
        _require(
            self.decay != "sqrt" or self.warmup > 0,
            "the sqrt decay falls as √(warmup / time), but warmup=0. Give the curve a warm-up.",
        )
        _require(
            self.decay != "step" or self.warmup <= _MILESTONES[0] * self.total,
            f"the warm-up ({self.warmup:g}) ends after the first step down, at a third of training ({self.total:g}). "
            "Shorten the warm-up.",
        )

    @property
    def decay_name(self) -> str:
        """Name of the decay; of a function its own."""
        return (
            self.decay if isinstance(self.decay, str) else getattr(self.decay, "__qualname__", "a function")
        )

    def __str__(self) -> str:
        return f"Curve({self.total:g}, warmup={self.warmup:g}, {self.warmup_kind}, decay={self.decay_name})"

    def rate(self, time: float, reference: float, peak: float) -> float:
        """Return the rate at `time` since the start of training. After the end it is the last one.

        Args:
            time: In the curve's unit.
            reference: Where the warm-up starts. No warm-up leads downwards: it starts at `peak`, if that is less.
            peak: Where the warm-up leads, and what the decay is a factor of.
        """
        start = min(reference, peak)
        if time < self.warmup and self.warmup_kind == "gradual":
            return start + (peak - start) * (time / self.warmup)
        if time < self.warmup:
            return start if self.warmup_kind == "constant" else peak
        decay = DECAYS[self.decay] if isinstance(self.decay, str) else self.decay
        return peak * decay(min(time, self.total), self.warmup, self.total)


class MomentumCorrection:
    """Corrects the velocity before each step whose rate is not that of the step before.

    Momentum SGD is written in two ways that agree while the rate η is constant:

        textbook:  u <- m u + g;      w <- w - η u     (torch.optim.SGD, and RMSprop's momentum)
        absorbed:  v <- m v + η g;    w <- w - v

    Since v = η u, v must follow a change of the rate: v <- m (η_new / η_old) v + η_new g. Without it a warm-up or
    a larger batch meets a velocity that is too small. No optimizer of torch needs this: their velocities hold no rate.
    An optimizer from elsewhere may; test it by comparing two steps of different rates with the textbook form.

    A step at rate 0 erases an absorbed velocity; what follows begins from zero, as the formula says.

    Args:
        optimizer: One of the absorbed form.
        velocity: The name under which it keeps v in its state.

    Contract:
        Local. Mutates the velocity, and adds a key to every group, so that the optimizer's `state_dict` carries it.

    Raises:
        ConfigurationError: The optimizer is one of torch's, whose velocity holds no rate.

    Source:
        Goyal et al. 2017, section 3, remark 2.
    """

    def __init__(self, optimizer: Optimizer, velocity: str = "momentum_buffer") -> None:
        if type(optimizer).__module__.startswith("torch.optim"):
            raise ConfigurationError(
                f"{type(optimizer).__name__} is torch's, whose velocity holds no rate: correcting it would be wrong. "
                "Leave MomentumCorrection out; it is for the form v = m v + lr g."
            )
        self._velocity = velocity
        self._hook = optimizer.register_step_pre_hook(self._correct)

    def remove(self) -> None:
        """Leave the optimizer alone from now on."""
        self._hook.remove()

    @torch.no_grad()
    def _correct(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        for group in optimizer.param_groups:
            rate, before = float(group["lr"]), group.get(_CORRECTED_RATE, 0.0)
            group[_CORRECTED_RATE] = rate
            if before in {rate, 0.0}:
                continue
            velocities: list[Tensor] = [
                state[self._velocity]
                for state in (optimizer.state.get(p, {}) for p in group["params"])
                if state.get(self._velocity) is not None
            ]
            if velocities:
                torch._foreach_mul_(velocities, rate / before)
