"""A step whose gradients are under way: what has to be done with each bucket that has arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.ddp.bucket import Bucket
from paceline.ddp.forward_overlap.moment import PLAIN, Moment, outside_transforms
from paceline.ddp.forward_overlap.piece_flight import PieceFlight

Action = Callable[[Sequence[Parameter]], None]
"""Something to be done with the parameters of a bucket that has arrived."""


@dataclass
class OpenStep:
    """One module's, on one rank.

    Attributes:
        flight: Its gradients.
        attach: Gives a bucket's parameters their gradients.
        conclude: Called when the last bucket has arrived, with the seconds spent waiting.
        left: Indices of buckets that have not been completed.
        actions: What to do with each, in this order, and when that was called.
        dropped: Ids of parameters whose gradients are dropped on arrival, after the actions.
        kept: Debug: parameters' values by id, while NaNs stand in for them.
        waited_s: So far.
    """

    flight: PieceFlight
    attach: Callable[[Bucket], None]
    conclude: Callable[[float], None]
    left: set[int]
    actions: list[tuple[Moment, Action]] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)
    kept: dict[int, Tensor] = field(default_factory=dict)
    waited_s: float = 0.0

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self.flight.buckets

    def make(self, bucket: Bucket) -> None:
        """Give a bucket that has arrived its gradients, and step it. Its parameters are outstanding meanwhile.

        Contract:
            Local.  Mutates: parameters, gradients, the optimizer's state.  Once: after an error they are undefined.
        """
        with outside_transforms():
            with PLAIN.again():
                self._restore(bucket)
                self.attach(bucket)
            for moment, action in self.actions:
                with moment.again():
                    action(bucket.parameters)

    def drop(self, ids: set[int]) -> None:
        """Drop these parameters' gradients on arrival, after what was called before. Local."""
        self.dropped |= ids

    def note_wait(self, seconds: float) -> None:
        """Somebody has waited so long for a bucket."""
        self.waited_s += seconds

    def poison(self) -> None:
        """Debug: whoever reads a parameter past the hooks from now on reads NaN."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for index in self.left:
                for parameter in self.buckets[index].parameters:
                    if parameter.is_floating_point() or parameter.is_complex():
                        self.kept[id(parameter)] = parameter.detach().clone()
                        parameter.detach().fill_(float("nan"))

    def _restore(self, bucket: Bucket) -> None:
        for parameter in bucket.parameters if self.kept else ():
            if (values := self.kept.pop(id(parameter), None)) is not None:
                parameter.detach().copy_(values)


def zero_gradients(parameters: Iterable[Tensor], set_to_none: bool) -> None:
    """As `Optimizer.zero_grad`, for these."""
    for parameter in parameters:
        if set_to_none or parameter.grad is None:
            parameter.grad = None
        else:
            parameter.grad = parameter.grad.detach_()
            parameter.grad.zero_()
