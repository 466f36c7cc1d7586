"""Whose gradient was the first that is not finite? One NaN of one rank is in every rank's parameters after the step.

Rules
1. Before a bucket leaves, one element of each of its gradients is looked at: what is not finite in a loss or an
   activation is in all elements of most gradients behind it. Looking at all elements would take as long as a copy.
2. What a rank has found is part of its control words. So all ranks know which one it was; only then they look closer.
3. Gradients that are not finite are no mistake where the step is skipped, as loss scaling does. So it is said at the
   next forward, and only if the parameter is not finite by then.
4. What was overlooked is in all ranks' gradients one step later: then no rank is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_INTEGERS = {
    1: torch.int8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}
_LEAST = {size: torch.iinfo(integers).min for size, integers in _INTEGERS.items()}  # has the bits of -0.0


class Sample:
    """The first elements of the gradients that lie in a buffer.

    Args:
        flat: The buffer.
        sizes: Elements of each gradient, in order; together at most the buffer's.
    """

    def __init__(self, flat: Tensor, sizes: Sequence[int]) -> None:
        places = [sum(sizes[:place]) for place, size in enumerate(sizes) if size > 0]
        self._flat = flat
        self._places = torch.tensor(places, dtype=torch.long, device=flat.device)
        self._zeros = flat.new_zeros(len(places))

    def take(self) -> Tensor:
        """The elements as they are now, shape (gradients,). Does not wait for the device."""
        return self._flat.index_select(0, self._places)

    def times_zero(self, elements: Tensor) -> Tensor:
        """Zero if all are finite, else NaN; shape (). Does not wait for the device."""
        return elements.dot(self._zeros)


def has_negative_zero(elements: Tensor) -> bool:
    """Whether one of them is -0.0. On an accelerator this waits for the device."""
    numbers = elements.view(_INTEGERS[elements.itemsize])
    return len(numbers) > 0 and numbers.min().item() == _LEAST[elements.itemsize]


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
