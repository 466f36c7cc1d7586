"""Base of LARS and LAMB: optimizers whose step for each parameter is as long as a fraction of its norm.

Rules
1. The ratio that a parameter's update is multiplied by is found for each parameter tensor ("layer") by itself.
2. The ratio is 1 where the parameter's or the update's norm is 0, or `max_trust_ratio` if that is less. It is 1 in
   groups with `layerwise=False`, which `max_trust_ratio` does not concern.
3. No gradient (`.grad` is None): no update, and no change of state.
4. The work of a step is a few passes over a group's tensors, by torch's foreach functions. On the host a large tensor
   is taken by itself: all its passes come before the next tensor's, while it is in the cache. That saves a third.
   There a parameter's step is bitwise the same whichever others are stepped with it.
5. Norms and ratios of an accelerator's tensors stay there (`Factors`): the host does not wait for them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import ConfigurationError
from paceline.given import number

LARGE_ELEMENTS = 2**14
SMALL_ELEMENTS = 2048  # up to here a call for each tensor costs more than copying it
_HALF = (torch.float16, torch.bfloat16)

Kind = tuple[torch.device, torch.dtype]

# A number for each of K tensors: of the host, or on an accelerator 0-dimensional tensors there.
Factors = list[float] | list[Tensor]


@dataclass(frozen=True)
class Tensors:
    """Parameters of one group, dtype and device that have gradients."""

    parameters: list[Tensor]  # K tensors, those of more than LARGE_ELEMENTS last
    gradients: list[Tensor]  # theirs
    states: list[dict[str, Any]]  # theirs: what the optimizer keeps, by name
    num_small: int  # how many have up to LARGE_ELEMENTS

    def kept(self, name: str) -> list[Tensor]:
        """Return the state of that name, one tensor per parameter. It begins as zeros."""
        for parameter, state in zip(self.parameters, self.states, strict=True):
            if name not in state:
                state[name] = torch.zeros_like(parameter)
        return [state[name] for state in self.states]

    def batches(self) -> Iterator[tuple[slice, Tensors]]:
        """Cut into what is best updated together (rule 4); the slice says which of the K."""
        num_tensors = len(self.parameters)
        on_host = self.parameters[0].device.type == "cpu"
        starts = [0, *range(max(self.num_small, 1), num_tensors)] if on_host else [0]
        for start, stop in zip(starts, [*starts[1:], num_tensors], strict=True):
            place = slice(start, stop)
            num_small = min(self.num_small, stop) - start
            yield place, Tensors(self.parameters[place], self.gradients[place], self.states[place], num_small)


def scale(targets: list[Tensor], factor: float) -> None:
    """`targets[k] *= factor`. Mutates `targets`."""
    on_host = targets[0].device.type == "cpu"
    # On the host a number costs a conversion for each tensor, a tensor none.
    torch._foreach_mul_(targets, torch.tensor(factor, dtype=torch.float64) if on_host else factor)


def _is_one_large(tensors: list[Tensor]) -> bool:
    """Return whether the plain operator is the faster one. Only the size decides, so a step's bits do not vary."""
    return len(tensors) == 1 and tensors[0].numel() > LARGE_ELEMENTS


def divide(denominators: list[Tensor], numerators: list[Tensor]) -> None:
    """`denominators[k] = numerators[k] / denominators[k]`. In place: a fresh tensor costs more than a pass."""
    if _is_one_large(denominators):
        torch.div(numerators[0], denominators[0], out=denominators[0])
    else:
        torch._foreach_reciprocal_(denominators)
        torch._foreach_mul_(denominators, numerators)


def times(factors: Factors, numbers: list[float]) -> Factors:
    """`factors[k] * numbers[k]`."""
    if (there := _on_device(factors)) is not None:
        return list(torch._foreach_mul(there, numbers))
    return [factor * number for factor, number in zip(cast("list[float]", factors), numbers, strict=True)]


def _on_device(factors: Factors) -> list[Tensor] | None:
    return factors if isinstance(factors[0], Tensor) else None


def add(targets: list[Tensor], tensors: list[Tensor], factors: Factors) -> None:
    """`targets[k] += factors[k] * tensors[k]`, in one pass; `tensors` may be `targets`. Mutates `targets`."""
    if (there := _on_device(factors)) is not None:
        _add_on_device(targets, tensors, there)
        return
    numbers = cast("list[float]", factors)
    if _is_one_large(targets):
        targets[0].add_(tensors[0], alpha=numbers[0])
    else:  # a foreach addition takes one factor for all; multiplying by 1 does not
        one = torch.ones((), dtype=targets[0].dtype, device=targets[0].device)
        torch._foreach_addcmul_(targets, tensors, [one] * len(targets), numbers)


def _add_on_device(targets: list[Tensor], tensors: list[Tensor], factors: list[Tensor]) -> None:
    dtype = targets[0].dtype
    if dtype in _HALF:  # which would round the factors, too
        for target, tensor, factor in zip(targets, tensors, factors, strict=True):
            target.copy_(torch.addcmul(target.float(), tensor.float(), factor.float()))
    else:
        torch._foreach_addcmul_(targets, tensors, torch.stack(factors).to(dtype).unbind())


def norms(*lists: list[Tensor]) -> list[list[float]]:
    """Return the Euclidean norms of lists of K tensors each, on the host: K numbers for every list.

    All lists have the same shapes, dtype and device. Small tensors are summed in double precision, others in their own,
    half precision in single: 4e-4 off for millions of elements. If squares may have overflowed or
    vanished, a tensor is summed again, scaled, in double precision.
    """
    sizes = [tensor.numel() for tensor in lists[0]]
    small = [k for k, size in enumerate(sizes) if size <= SMALL_ELEMENTS]
    large = [k for k, size in enumerate(sizes) if size > SMALL_ELEMENTS]
    found = torch.empty(len(lists), len(sizes), dtype=torch.float64)
    if small:
        lengths = torch.tensor([sizes[k] for k in small])
        found[:, small] = torch.stack([_by_segments([t[k] for k in small], lengths) for t in lists])
    if large:
        dtype = torch.float32 if lists[0][0].dtype in _HALF else None
        each = [norm for t in lists for norm in torch._foreach_norm([t[k] for k in large], 2.0, dtype)]
        found[:, large] = torch.stack(each).to("cpu", torch.float64).view(len(lists), -1)
    numbers: list[list[float]] = found.tolist()
    summed = torch.float64 if lists[0][0].dtype == torch.float64 else torch.float32
    again = range(len(sizes)) if summed == torch.float64 else large
    for of_list, tensors in zip(numbers, lists, strict=True):
        for k in again:
            if not _is_in_range(of_list[k], sizes[k], torch.finfo(summed)):
                of_list[k] = _scaled_norm(tensors[k])
    return numbers


def norms_on_device(tensors: list[Tensor]) -> list[Tensor]:
    """Return the Euclidean norms of K tensors of an accelerator, as K numbers there. The host does not wait.

    They are in double precision, where the device has it, so that squares of narrower numbers neither overflow nor
    vanish.
    """
    wide = torch.float32 if tensors[0].device.type == "mps" else torch.float64
    return list(torch._foreach_norm(tensors, 2.0, wide))


def _is_in_range(norm: float, size: int, numbers: torch.finfo) -> bool:
    """Return whether a norm may be believed: no square overflowed, and what vanished of them does not count."""
    return math.sqrt(size * numbers.tiny / numbers.eps) < norm < math.inf or size == 0


def _scaled_norm(tensor: Tensor) -> float:
    """Return the norm, computed from elements divided by the largest. It takes another pass, but cannot overflow."""
    if not tensor.numel():
        return 0.0
    least, most = torch.aminmax(tensor)
    largest = float(torch.maximum(-least, most))
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * float(torch.linalg.vector_norm(tensor.double() / largest))


def _by_segments(tensors: list[Tensor], lengths: Tensor) -> Tensor:
    squares = torch._utils._flatten_dense_tensors(tensors).double().square()
    return torch.segment_reduce(squares, "sum", lengths=lengths, unsafe=True).sqrt_()


class LayerwiseOptimizer(Optimizer, ABC):
    """The base of LARS and LAMB: steps group by group. Final classes define the update of a group."""

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
        work = [(tensors, group) for group in self.param_groups for tensors in self._with_gradients(group)]
        for tensors, group in work:
            self._update(tensors, group)
        return loss

    def _with_gradients(self, group: dict[str, Any]) -> Iterator[Tensors]:
        small: dict[Kind, list[tuple[Tensor, Tensor]]] = {}
        large: dict[Kind, list[tuple[Tensor, Tensor]]] = {}
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None:
                if gradient.is_sparse:
                    raise self._sparse(parameter)
                pairs = large if parameter.numel() > LARGE_ELEMENTS else small
                pairs.setdefault((parameter.device, parameter.dtype), []).append((parameter, gradient))
        for kind in dict.fromkeys([*small, *large]):
            pairs_of_kind = [*small.get(kind, ()), *large.get(kind, ())]
            parameters, gradients = map(list, zip(*pairs_of_kind, strict=True))
            states = list(map(self.state.__getitem__, parameters))
            yield Tensors(parameters, gradients, states, len(small.get(kind, ())))

    def _sparse(self, parameter: Tensor) -> ConfigurationError:
        return ConfigurationError(
            f"{type(self).__name__}: a parameter of shape {list(parameter.shape)} has a sparse gradient, whose "
            "norm says nothing about the rows it leaves out. Use torch.optim.SparseAdam for that parameter, or "
            "make its layer with sparse=False."
        )


def check_numbers(owner: str, group: dict[str, Any], names: tuple[str, ...]) -> None:
    """Raise ConfigurationError for a setting that is negative or not finite."""
    for name in names:
        if not 0 <= number(group[name]) < math.inf:
            raise ConfigurationError(
                f"{owner}: {name}={group[name]!r} has to be a finite number of at least 0."
            )


def check_max_trust_ratio(owner: str, group: dict[str, Any]) -> None:
    """Raise ConfigurationError for an upper bound that is not positive."""
    bound = group["max_trust_ratio"]
    if bound is not None and not number(bound) > 0:
        raise ConfigurationError(
            f"{owner}: max_trust_ratio={bound!r} has to be positive, or None for no bound."
        )


def trust_ratio(of_weights: float, of_update: float, most: float | None, dtype: torch.dtype) -> float:
    """Return the quotient of two norms, at most `most`; rule 2 where one of them is 0.

    It is also at most the largest number of `dtype` to the power of 3/4; for half precision that of float32. A larger
    factor would be infinite, and infinity times an element of 0 is not a number.
    """
    ratio = 1.0 if of_weights == 0 or of_update == 0 else of_weights / of_update
    return min(ratio, _most(most, dtype))


def trust_ratios_on_device(
    of_weights: Sequence[Tensor], of_updates: Sequence[Tensor], most: float | None, dtype: torch.dtype
) -> list[Tensor]:
    """Return `trust_ratio` of K tensors of an accelerator, in the precision of their norms."""
    weights, updates = torch.stack(list(of_weights)), torch.stack(list(of_updates))
    ratios = torch.where((weights == 0) | (updates == 0), 1.0, weights / updates).clamp(
        max=_most(most, dtype)
    )
    return list(ratios.unbind())


def _most(most: float | None, dtype: torch.dtype) -> float:
    largest: float = float(torch.finfo(torch.float32 if dtype in _HALF else dtype).max) ** 0.75
    return largest if most is None else min(most, largest)
