"""What LARS and LAMB share: a step for each parameter whose length follows from its norm.

Rules
1. The ratio that a parameter's update is multiplied by is found for each parameter tensor ("layer") by itself.
2. The ratio is 1 where the parameter's or the update's norm is 0, and in groups with `layerwise=False`.
3. No gradient (`.grad` is None): no update, and no change of state.
4. The work of a step is a few passes over all tensors of a group, by torch's foreach functions. All norms of a group
   reach the host together, once: on an accelerator that is one wait a group and dtype.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import ConfigurationError

BATCH_ELEMENTS = 2**19


@dataclass(frozen=True)
class Tensors:
    """Parameters of one group, dtype and device that have gradients.

    Attributes:
        parameters: K tensors.
        gradients: Theirs.
        states: Theirs: what the optimizer keeps, by name.
        ones: K times the number 1, for `_foreach_addcmul_`: with it a foreach addition takes a factor for each tensor.
    """

    parameters: list[Tensor]
    gradients: list[Tensor]
    states: list[dict[str, Any]]
    ones: list[Tensor]

    def kept(self, name: str) -> list[Tensor]:
        """The state of that name, one tensor a parameter; zeros at first."""
        for parameter, state in zip(self.parameters, self.states, strict=True):
            if name not in state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return [state[name] for state in self.states]

    def scale(self, targets: list[Tensor], factor: float) -> None:
        """`targets[k] *= factor`. Mutates `targets`."""
        # On the host a number costs a conversion for each tensor, a tensor none.
        on_host = targets[0].device.type == "cpu"
        torch._foreach_mul_(targets, torch.tensor(factor, dtype=torch.float64) if on_host else factor)

    def add(self, targets: list[Tensor], tensors: list[Tensor], factors: Tensor) -> None:
        """`targets[k] += factors[k] * tensors[k]`, in one pass. Mutates `targets`."""
        torch._foreach_addcmul_(targets, tensors, self.ones, factors)


class LayerwiseOptimizer(Optimizer, ABC):
    """Steps group by group; final classes say how a group is updated."""

    @abstractmethod
    def _check(self, group: dict[str, Any]) -> None:
        """Raise ConfigurationError if a group's settings cannot be."""

    @abstractmethod
    def _update(self, tensors: Tensors, group: dict[str, Any]) -> None:
        """Step these parameters. Mutates parameters and states, not gradients."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with settings of their own.

        Raises:
            ConfigurationError: A setting is out of range, or a parameter is complex.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check(group)
            self._check_real(group["params"])
        except ConfigurationError:
            self.param_groups.pop()
            raise

    def _check_real(self, parameters: list[Tensor]) -> None:
        for parameter in parameters:
            if parameter.is_complex():
                raise ConfigurationError(
                    f"{type(self).__name__}: a parameter of shape {list(parameter.shape)} is complex, for which the "
                    "method is not defined. Optimize it with another optimizer, or as torch.view_as_real."
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients.

        Args:
            closure: Computes gradients again and returns the loss, which is returned.

        Contract:
            Local.  Mutates: parameters and this object's state.

        Raises:
            ConfigurationError: A gradient is sparse; nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise ConfigurationError(
                    f"{type(self).__name__}: a parameter of shape {list(parameter.shape)} has a sparse gradient, whose "
                    "norm says nothing about the rows it leaves out. Use torch.optim.SparseAdam for that parameter, or "
                    "make its layer with sparse=False."
                )
        for group in self.param_groups:
            for tensors in self._with_gradients(group):
                self._update(tensors, group)
        return loss

    def _with_gradients(self, group: dict[str, Any]) -> Iterator[Tensors]:
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                by_kind.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        for (device, dtype), parameters in by_kind.items():
            one = torch.ones((), dtype=dtype, device=device)
            for batch in _batches(parameters, math.inf if device.type != "cpu" else BATCH_ELEMENTS):
                gradients = [parameter.grad for parameter in batch if parameter.grad is not None]
                states = [self.state[parameter] for parameter in batch]
                yield Tensors(batch, gradients, states, [one] * len(batch))


def _batches(parameters: list[Tensor], most: float) -> Iterator[list[Tensor]]:
    """Consecutive parameters of together at most so many elements, or one that has more."""
    batch: list[Tensor] = []
    left = most
    for parameter in parameters:
        left -= parameter.numel()
        if batch and left < 0:
            yield batch
            batch, left = [], most - parameter.numel()
        batch.append(parameter)
    yield batch


def check_numbers(owner: str, group: dict[str, Any], names: tuple[str, ...]) -> None:
    """Refuse settings that are negative or not finite.

    Raises:
        ConfigurationError: Naming the first.
    """
    for name in names:
        if not (group[name] >= 0 and math.isfinite(group[name])):
            raise ConfigurationError(
                f"{owner}: {name}={group[name]} has to be a finite number of at least 0."
            )


def check_max_trust_ratio(owner: str, group: dict[str, Any]) -> None:
    """Refuse an upper bound that is not positive.

    Raises:
        ConfigurationError: It is not.
    """
    bound = group["max_trust_ratio"]
    if bound is not None and not bound > 0:
        raise ConfigurationError(
            f"{owner}: max_trust_ratio={bound} has to be positive, or None for no bound."
        )
