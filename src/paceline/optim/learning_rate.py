"""The learning rate: how it follows the batch, how it moves over time, and what momentum needs when it changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import ConfigurationError
from paceline.numbers_given import number
from paceline.optim.decays import Decay, choose_decay

SCALING_RULES: dict[str, Callable[[float], float]] = {
    "linear": lambda ratio: ratio,
    "sqrt": math.sqrt,
    "none": lambda _: 1.0,
}
WARMUPS = ("gradual", "constant", "none")

# In each group: the rate of its last step; saved with the optimizer's state.
_CORRECTED_RATE = "momentum_correction_rate"


def rate_factor(scaling: str, batch: int, reference_batch: int) -> float:
    """What the reference rate is multiplied by for a batch of `batch` samples.

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
    if scaling not in SCALING_RULES:
        raise ConfigurationError(
            f"scaling={scaling!r} is not a rule for the rate. Give one of {', '.join(map(repr, SCALING_RULES))}."
        )
    for name, size in (("batch", batch), ("reference_batch", reference_batch)):
        if not 0 < number(size) < math.inf:
            raise ConfigurationError(
                f"{name}={size!r} is not a positive number of samples. Give the samples of one step over all ranks."
            )
    return SCALING_RULES[scaling](batch / reference_batch)


@dataclass(frozen=True)
class Curve:
    """A learning rate over time. All times have one unit, the caller's: epochs, steps or samples.

    Attributes:
        total: How long training takes.
        warmup: How long the warm-up takes, from the start of training.
        warmup_kind: "gradual": in a straight line from the reference rate to the peak. "constant": the reference
            rate, then the peak at once. "none": the peak from the start, whatever `warmup` says.
        decay: What follows: "none", "linear", "sqrt", "step", "cosine", "polynomial", or a `Decay` with its settings.

    Raises:
        ConfigurationError: A length is not possible, or a name is unknown.

    Source:
        Goyal et al. 2017, section 2.2.
    """

    total: float
    warmup: float = 0.0
    warmup_kind: str = "gradual"
    decay: Decay | str = "none"

    def __post_init__(self) -> None:
        if not 0 < number(self.total) < math.inf:
            raise ConfigurationError(
                f"total={self.total!r} is not a length of training. Give a positive number of epochs or steps."
            )
        if not number(self.warmup) >= 0:
            raise ConfigurationError(f"warmup={self.warmup!r} is not a length. Give 0 for no warm-up.")
        if self.warmup > self.total:
            raise ConfigurationError(
                f"the warm-up ({self.warmup:g}) is longer than training ({self.total:g}), so the rate would never "
                "arrive. Both have the same unit; the paper warms up for 5 of 90 epochs."
            )
        if self.warmup_kind not in WARMUPS:
            raise ConfigurationError(
                f"warmup_kind={self.warmup_kind!r} is not a warm-up. Give one of {', '.join(map(repr, WARMUPS))}."
            )
        object.__setattr__(self, "decay", choose_decay(self.decay))
        self._decay.check(self.warmup, self.total)

    @property
    def _decay(self) -> Decay:
        return choose_decay(self.decay)

    def rate(self, time: float, reference: float, peak: float) -> float:
        """The rate at `time` since the start of training; after the end, the last one.

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
        return peak * self._decay.factor(min(time, self.total), self.warmup, self.total)


class CurveLR(LRScheduler):
    """Sets the rate of every step by a curve whose unit is the step.

    Each group's reference rate is the `lr` that it has when the scheduler is made. Before the first step the rate is
    that of time 0; call `step()` after each `optimizer.step()`. For a rate that follows ranks and accumulation by
    itself, see `paceline.recipes.LargeMinibatch`.

    Args:
        optimizer: Any optimizer.
        curve: Lengths in steps.
        factor: How much more than the reference rate the peak is (`rate_factor`).
        last_epoch: Of torch: the number of steps done, if `optimizer` has been restored already.

    Contract:
        Local: the same on every rank, as long as all ranks take the same steps. Mutates the groups' `lr`.
    """

    def __init__(self, optimizer: Optimizer, curve: Curve, factor: float = 1.0, last_epoch: int = -1) -> None:
        if not 0 < number(factor) < math.inf:
            raise ConfigurationError(
                f"factor={factor!r} makes no rate. Give the peak rate over the reference rate, such as "
                "rate_factor('linear', batch=1024, reference_batch=256)."
            )
        self.curve = curve
        self.factor = factor
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Return the rate of the next step for each group; torch's name."""
        references = [float(base) for base in self.base_lrs]
        return [self.curve.rate(self.last_epoch, rate, rate * self.factor) for rate in references]

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs: plain numbers, no curve; the curve is the constructor's."""
        kept = ("last_epoch", "_step_count", "_last_lr", "base_lrs", "factor")
        return {name: self.__dict__[name] for name in kept}


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
        optimizer: Of the absorbed form.
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
