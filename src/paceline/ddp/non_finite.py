"""Whose gradient was the first that is not finite? One NaN of one rank is in every rank's parameters after the step.

Rules
1. Before a bucket leaves, one element of each of its gradients is looked at: what is not finite in a loss or an
   activation is in all elements of most gradients behind it. Looking at all elements would take as long as a copy.
2. What a rank has found is part of its status words. So all ranks know which one it was; only then they look closer.
3. Gradients that are not finite are no mistake where the step is skipped, as loss scaling does. So it is said at the
   next forward, and only if the parameter is not finite by then.
4. What was overlooked is in all ranks' gradients one step later: then no rank is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Suspicion:
    """A step whose gradients are not all finite.

    Attributes:
        step: Its number.
        ranks: Whose gradients were not.
        name: Of the first parameter, in backward's order, whose gradient is not.
        parameter: It.
        is_old: Parameters were not finite before that step.
    """

    step: int
    ranks: list[int]
    name: str
    parameter: Tensor
    is_old: bool

    @classmethod
    def of(cls, step: int, ranks: list[int], named: Sequence[tuple[str, Tensor]]) -> Suspicion | None:
        """Look at all gradients in this order, until one is not finite. On an accelerator this waits for the device."""
        for name, parameter in named:
            if parameter.grad is not None and not is_finite(parameter.grad):
                return cls(step, ranks, name, parameter, not all(is_finite(one) for _, one in named))
        return None

    def has_come_true(self) -> bool:
        """Whether the parameter is not finite any more either."""
        return not is_finite(self.parameter)


@torch.no_grad()
def is_finite(tensor: Tensor) -> bool:
    """Whether all elements are."""
    return bool((tensor._values() if tensor.is_sparse else tensor).isfinite().all())
