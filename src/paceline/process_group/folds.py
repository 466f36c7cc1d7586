"""Folds: reductions of two slices, elementwise, for every ReduceOp and dtype that allows it; and tensors as slices.

16-bit floating-point sums and products are accumulated in float32 and rounded once, by the rank that completes the
block. Minimum, maximum and bitwise operations round nothing and stay in their dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.device import to_device, to_host
from paceline.errors import ConfigurationError

PREMULTIPLIED = "PREMUL_SUM"
_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_NARROW = (torch.float16, torch.bfloat16)
# torch has no arithmetic for these; in two's complement that of the signed ones has the same bits.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@dataclass(frozen=True)
class Fold:
    """The way to reduce tensors of one dtype by one operation."""

    name: str
    view_as: torch.dtype  # what the message is seen as: its dtype, or a signed one of the same size
    accumulate_in: torch.dtype  # of partial results, in memory and on the wire
    function: Callable[..., Tensor]
    averages: bool
    premultiplies: bool  # every rank first multiplies its input with the operation's factor
    widens: bool  # `accumulate_in` is wider than `view_as`

    def into(self, accumulated: Tensor, received: Tensor, received_is_left: bool) -> None:
        """Fold `received` into `accumulated`, shape (n,) both; the left operand decides the bits of a NaN."""
        left, right = (received, accumulated) if received_is_left else (accumulated, received)
        self.function(left, right, out=accumulated)

    def all_of(self, inputs: Sequence[Tensor], target: Tensor, num_averaged: int) -> None:
        """Replace `target` by the fold of `inputs`, shape (n,) each, or of one of the first two; rounded once.

        The target is seen as `view_as`. An average is taken over `num_averaged` ranks; 0: it is not complete yet.
        """
        wide = target
        if self.widens:
            wide = torch.empty_like(target, dtype=self.accumulate_in)
            inputs = [values.to(self.accumulate_in) for values in inputs]
        if len(inputs) > 1:
            self.function(inputs[0], inputs[1], out=wide)
        elif wide is not inputs[0]:
            wide.copy_(inputs[0])
        for values in inputs[2:]:
            self.function(wide, values, out=wide)
        if self.averages and num_averaged:
            self.average(wide, num_averaged)
        if self.widens:
            target.copy_(wide)

    def average(self, completed: Tensor, num_ranks: float) -> None:
        """Divide a completed sum in place; integers are cut off towards zero."""
        rounding = None if completed.is_floating_point() or completed.is_complex() else "trunc"
        torch.div(completed, num_ranks, rounding_mode=rounding, out=completed)


@lru_cache(maxsize=256)
def fold_of(op_name: str, dtype: torch.dtype) -> Fold:
    """Return the fold of a reduce operation of torch, by name. Raises ConfigurationError if the dtype has none."""
    premultiplies = op_name == PREMULTIPLIED
    name = "SUM" if premultiplies else op_name
    function, ordered = _FUNCTIONS.get(name), name in {"MIN", "MAX"}
    view_as = _SIGNED.get(dtype, dtype)
    widens = dtype in _NARROW and not ordered
    if function is None:
        reason = f"the operations are {', '.join(_FUNCTIONS)}"
    elif view_as != dtype and (ordered or name == "AVG"):
        reason = "torch has no such arithmetic for it; cast to int64 first"
    elif premultiplies and not (dtype.is_floating_point or dtype.is_complex):
        reason = "the factor is no integer; cast to float64 first"
    else:
        accumulate_in = torch.float32 if widens else view_as
        fold = Fold(name, view_as, accumulate_in, function, name == "AVG", premultiplies, widens)
        one = torch.zeros(dtype.itemsize, dtype=torch.uint8, device="cpu").view(view_as)
        try:
            fold.all_of([one, one], one, 1)
        except (RuntimeError, NotImplementedError) as error:
            reason = f"{str(error).splitlines()[0].rstrip('.')}; cast to another dtype first"
        else:
            return fold
    raise ConfigurationError(f"cannot reduce {dtype} by {op_name}: {reason}. Nothing was sent.")


@lru_cache(maxsize=256)
def fold_by(op: dist.ReduceOp | dist.ReduceOp.RedOpType, dtype: torch.dtype) -> Fold:
    """Return `fold_of` an operation. It is as good a key as its name, which takes longer to find."""
    return fold_of(op_name(op), dtype)


def op_name(op: dist.ReduceOp | dist.ReduceOp.RedOpType | None) -> str:
    """Return the name of a `torch.distributed` operation; "" if there is none."""
    if op is None:
        return ""
    return _name(getattr(op, "op", op))  # a ReduceOp holds its kind; a kind passes for a ReduceOp


@lru_cache(maxsize=32)
def _name(kind: Any) -> str:
    """Return an enumeration member's name. It is cached, as writing it takes longer than folding a small message."""
    return str(kind).rpartition(".")[2]


def factor_of(op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> float:
    """Return the factor by which a PREMUL_SUM multiplies every rank's input."""
    premultiplied: Any = op
    factor = premultiplied.__getstate__()[1]  # nothing else reveals it
    return float(factor.item() if isinstance(factor, Tensor) else factor)


# ---- a tensor as one slice


def flat_of(tensor: Tensor) -> Tensor:
    """Return the values as a contiguous 1-D tensor of the CPU: their own memory, or a copy, pinned for an accelerator.

    A copy is made if that memory is not contiguous or not the host's. Negated and conjugated values are copied, too:
    torch negates them when it reads them. `write_back` copies a result back into an output.
    """
    if not _is_in_place(tensor):
        return (_plain(tensor.detach()) if tensor.is_cpu else to_host(tensor)).view(-1)
    return tensor if tensor.dim() == 1 and not tensor.requires_grad else tensor.detach().view(-1)


def write_back(flat: Tensor, tensor: Tensor) -> None:
    """Copy `flat`, which was made of `tensor`, back into it, unless both share memory."""
    if flat is not tensor and not _is_in_place(tensor):
        to_device(tensor, flat)


def _is_in_place(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())


def bytes_of(flat: Tensor) -> Tensor:
    """Return the same memory as bytes, for Gloo, which knows few dtypes. `flat` is of `flat_of`."""
    return flat.view(torch.uint8)


def apart(reads: Sequence[Tensor], writes: Sequence[Tensor], shift: int = 0) -> Sequence[Tensor]:
    """Return `reads`, copied if writing one of `writes` might change one of them before it is read.

    All are contiguous. Read i is in place, and needs no copy, if its memory is that of write i + `shift`.
    """
    spans = [(write.data_ptr(), write.nbytes) for write in writes]
    for index, read in enumerate(reads):
        span = first, num_bytes = read.data_ptr(), read.nbytes
        for place, (start, length) in enumerate(spans):
            overlaps = start < first + num_bytes and first < start + length
            if overlaps and not (index + shift == place and span == spans[place]):
                return [each.clone() for each in reads]
    return reads


def _plain(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous()
