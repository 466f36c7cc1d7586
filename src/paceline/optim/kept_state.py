"""An optimizer's state of some parameters, copied before a step that may have to be undone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class KeptState:
    """Copies of what `optimizer.state` holds for parameters, in memory that is used again for the next step.

    Args:
        optimizer: Its state of a parameter is a dictionary of tensors and numbers, as that of torch's.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        # The objects that were there; what tensors held is in `_copies`.
        self._before: dict[Tensor, dict[str, Any]] = {}
        self._copies: dict[tuple[Tensor, str], Tensor] = {}

    def take(self, parameters: Iterable[Tensor]) -> None:
        """Copy the state of these parameters, besides those taken before, of which the first copy counts."""
        state = self._optimizer.state
        sources, targets = [], []
        for parameter in parameters:
            if parameter in self._before:
                continue  # its step raised, and is tried again
            held = self._before[parameter] = dict(state.get(parameter, {}))
            for name, value in held.items():
                if isinstance(value, Tensor):
                    sources.append(value)
                    targets.append(self._copy_for((parameter, name), value))
        if sources:
            torch._foreach_copy_(targets, sources)

    def _copy_for(self, key: tuple[Tensor, str], value: Tensor) -> Tensor:
        found = self._copies.get(key)
        if found is None or _layout(found) != _layout(value):
            found = self._copies[key] = torch.empty_like(value)
        return found

    def put_back(self) -> None:
        """Make the state that of `take`, for all parameters that were taken: the same objects, with the same values."""
        state = self._optimizer.state
        with torch.no_grad():
            for parameter, held in self._before.items():
                for name, value in held.items():
                    if isinstance(value, Tensor):
                        value.copy_(self._copies[parameter, name])
                if held:
                    state[parameter].clear()
                    state[parameter].update(held)
                else:
                    state.pop(parameter, None)
        self.drop()

    def drop(self) -> None:
        """Forget what was taken: the step counts."""
        self._before.clear()


def _layout(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device
