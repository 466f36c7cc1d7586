"""Momentum when the rate changes, for optimizers whose velocity has the rate in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import ConfigurationError

_APPLIED = (
    "momentum_correction_rate"  # in each group: the rate of its last step; saved with the optimizer's state
)


class MomentumCorrection:
    """Corrects the velocity before each step whose rate is not that of the step before.

    Momentum SGD is written in two ways that agree while the rate η is constant:

        textbook:  u <- m u + g;      w <- w - η u     (torch.optim.SGD, and RMSprop's momentum)
        absorbed:  v <- m v + η g;    w <- w - v

    Since v = η u, a change of the rate must change v along: v <- m (η_new / η_old) v + η_new g. Without it a warm-up or
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
            rate, before = float(group["lr"]), group.get(_APPLIED, 0.0)
            group[_APPLIED] = rate
            if before in {rate, 0.0}:
                continue
            velocities: list[Tensor] = [
                state[self._velocity]
                for state in (optimizer.state.get(p, {}) for p in group["params"])
                if state.get(self._velocity) is not None
            ]
            if velocities:
                torch._foreach_mul_(velocities, rate / before)
