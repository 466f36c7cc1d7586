"""Combining slices: what SUM, MAX and the others do to two tensors, and in which precision.

Half and quarter precision is accumulated in single precision and rounded once per host: Gloo rounds after every rank.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import ConfigurationError

CHUNK_BYTES = 512 * 1024  # folded and handed on while it is in the cache

_R = dist.ReduceOp.RedOpType
_COMBINE: dict[Any, Callable[..., Tensor]] = {
    _R.SUM: torch.add,
    _R.AVG: torch.add,
    _R.PREMUL_SUM: torch.add,
    _R.PRODUCT: torch.mul,
    _R.MIN: torch.minimum,
    _R.MAX: torch.maximum,
    _R.BAND: torch.bitwise_and,
    _R.BOR: torch.bitwise_or,
    _R.BXOR: torch.bitwise_xor,
}
_NUMBERS = {kind: number for number, kind in enumerate(_COMBINE)}
_LINEAR = {_R.SUM, _R.AVG, _R.PREMUL_SUM}  # linear: a complex tensor is two real ones


@dataclass(frozen=True)
class Fold:
    """A reduction, as one may apply it to slices.

    Attributes:
        number: Identifies the reduction in a notice.
        name: What torch calls it.
        combine: What makes one slice of two.
        scale: What the result is multiplied with; None for nothing.
        is_linear: Whether complex numbers may be treated as pairs of real ones.
    """

    number: int
    name: str
    combine: Callable[..., Tensor]
    scale: float | None
    is_linear: bool

    def into(self, target: Tensor, others: Sequence[Tensor]) -> None:
        """Replace `target` by the combination of it and `others`, all of one dtype and length.

        Contract:
            Local. Mutates `target` only.
        """
        if not others:
            self._scale(target)
            return
        if not _is_narrow(target.dtype):
            for other in others:
                self.combine(target, other, out=target)
            self._scale(target)
            return
        wide = target.float()
        for other in others:
            self.combine(wide, other.float(), out=wide)
        self._scale(wide)
        target.copy_(wide)

    def _scale(self, tensor: Tensor) -> None:
        if self.scale is None:
            return
        if tensor.is_floating_point():
            tensor.mul_(self.scale)
        else:
            tensor.copy_(torch.mul(tensor.double(), self.scale).trunc_())


def fold_for(operation: Any, dtype: torch.dtype, num_ranks: int) -> Fold:
    """Return the fold of a c10d reduction operation for this dtype.

    Raises:
        ConfigurationError: The operation cannot be done on the dtype.
    """
    for kind in _COMBINE:  # a ReduceOp compares with its kinds, but does not hash like them
        if operation == kind:
            break
    else:
        raise ConfigurationError(f"{operation} is not a reduction that the paceline backend knows.")
    if kind is _R.PREMUL_SUM:
        return dataclasses.replace(_make(kind, dtype, num_ranks), scale=_factor_of(operation))
    return _make(kind, dtype, num_ranks)


@functools.cache
def _make(kind: Any, dtype: torch.dtype, num_ranks: int) -> Fold:
    bitwise = kind in {_R.BAND, _R.BOR, _R.BXOR}
    if bitwise and (dtype.is_floating_point or dtype.is_complex):
        raise ConfigurationError(f"ReduceOp.{kind.name} combines bits; a tensor of {dtype} has numbers. Use integers.")
    if kind in {_R.MIN, _R.MAX} and dtype.is_complex:
        raise ConfigurationError(f"ReduceOp.{kind.name} needs an order, and {dtype} has none.")
    scale = 1.0 / num_ranks if kind is _R.AVG else None
    return Fold(_NUMBERS[kind], kind.name, _COMBINE[kind], scale, kind in _LINEAR)


def real_view(flat: Tensor, fold: Fold) -> Tensor:
    """Alias complex numbers as pairs of real ones where the reduction is linear."""
    if fold.is_linear and flat.is_complex():
        return torch.view_as_real(flat).view(-1)
    return flat


def _is_narrow(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize < 4


def _factor_of(operation: Any) -> float:
    """The factor of a PREMUL_SUM, which only its pickled state reveals."""
    factor = operation.__getstate__()[1]
    return float(factor.item() if isinstance(factor, Tensor) else factor)
