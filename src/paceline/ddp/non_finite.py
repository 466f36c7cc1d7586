"""Whose gradient was the first that is not finite? One NaN of one rank is in every rank's parameters after the step.

Rules
1. Before a bucket leaves, one element of each of its gradients is looked at: what is not finite in a loss or an
   activation is in all elements of most gradients behind it. Looking at all elements would take as long as a copy.
2. What a rank has found is part of its status words. So all ranks know which one it was; only then they look closer.
3. Gradients that are not finite are no mistake where the step is skipped, as loss scaling does. So it is said at the
   next forward, and only if the parameter is not finite by then.
4. What was overlooked is in all ranks' gradients one step later: then no rank is named.
5. An accelerator says later what was in its gradients: a rank tells the others in the first step after that. By then
   the parameters say for themselves whether they are finite, and which gradient was the first is not known.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.device import AsyncValue
from paceline.recording.fingerprints import is_finite


class Seen:
    """What this rank has seen of its gradients in the steps so far and has not told the others."""

    def __init__(self) -> None:
        self._under_way: deque[AsyncValue] = deque()  # of accelerators, a number a step (rule 5)

    def any_of(self, buckets: Sequence[Tensor]) -> bool:
        """Whether one of these is NaN; of accelerators, one of those of earlier calls that has arrived meanwhile.

        Shape () each: NaN for a bucket with gradients that are not finite, else zero. Does not wait for a device.
        """
        found = any(math.isnan(bucket.item()) for bucket in buckets if bucket.is_cpu)
        while self._under_way and self._under_way[0].has_arrived():
            found = bool(self._under_way.popleft().read().isnan()) or found
        on_device = [bucket for bucket in buckets if not bucket.is_cpu]
        if on_device:
            first, *others = on_device
            total = torch.stack([first, *(bucket.to(first) for bucket in others)]).sum() if others else first
            self._under_way.append(AsyncValue(total))
        return found


@dataclass(frozen=True)
class Suspicion:
    """A step whose gradients are not all finite."""

    step: int  # its number
    ranks: list[int]  # whose gradients were not
    name: str  # of the first parameter, in backward's order, whose gradient is not
    parameter: Tensor
    is_old: bool  # parameters were not finite before that step
    # it was one of the steps before `step`; `name` is that of the first parameter (rule 5)
    is_late: bool = False

    @classmethod
    def of(
        cls, step: int, ranks: list[int], named: Sequence[tuple[str, Tensor]], is_late: bool = False
    ) -> Suspicion | None:
        """Look at all gradients in this order, until one is not finite; if told late, at parameters.

        On an accelerator this waits for the device.
        """
        if is_late:
            found = next(((name, one) for name, one in named if not is_finite(one)), None)
            return None if found is None else cls(step, ranks, *found, is_old=False, is_late=True)
        for name, parameter in named:
            if parameter.grad is not None and not is_finite(parameter.grad):
                return cls(step, ranks, name, parameter, not all(is_finite(one) for _, one in named))
        return None

    def has_come_true(self) -> bool:
        """Whether the parameter is not finite any more either."""
        return not is_finite(self.parameter)
