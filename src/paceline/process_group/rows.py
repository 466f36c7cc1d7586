"""The tensors of a collective, as c10d passes them: one a rank, a list with a row for each rank, or one large tensor.

A large tensor is cut into rows that alias it. All that can be wrong with a rank's own arguments is refused before
anything is launched. The group then stays usable.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from paceline.errors import ConfigurationError


class Rows:
    """Cuts and checks the tensors of one rank's collectives.

    Every method raises ConfigurationError for tensors that do not fit. Local.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank = rank
        self._num_ranks = num_ranks

    def cut(self, kind: str, tensor: Tensor, num_elements: int) -> list[Tensor]:
        """Return a row of `num_elements` for each rank: 1-D views of `tensor`, which has to be contiguous."""
        if tensor.numel() != num_elements * self._num_ranks:
            raise ConfigurationError(
                f"{kind} on rank {self._rank}: the large tensor has {tensor.numel()} elements, which is not "
                f"{self._num_ranks} (ranks) times {num_elements}."
            )
        if not tensor.is_contiguous():
            raise ConfigurationError(
                f"{kind} on rank {self._rank}: the large tensor must be contiguous. Pass a copy."
            )
        flat = tensor.detach().view(-1)
        return list(flat.chunk(self._num_ranks)) if num_elements else [flat] * self._num_ranks

    def split(self, kind: str, tensor: Tensor, sizes: list[int]) -> list[Tensor]:
        """Cut along the first dimension: into rows of these sizes, or into equal ones if there are none."""
        if tensor.requires_grad:
            tensor = tensor.detach()
        size, num_ranks = tensor.shape[0], self._num_ranks
        fits = len(sizes) == num_ranks and sum(sizes) == size if sizes else size % num_ranks == 0
        if not fits:
            raise ConfigurationError(
                f"{kind} on rank {self._rank}: a tensor with {size} rows cannot be split into "
                f"{sizes or 'equal parts'} for {num_ranks} ranks."
            )
        if not sizes and size:
            return list(tensor.chunk(num_ranks))  # in a third of the time of `split`
        return list(tensor.split(sizes or [0] * num_ranks))

    def check(
        self, kind: str, reads: Sequence[Tensor], writes: Sequence[Tensor], options: Any = None
    ) -> None:
        """Make sure that values of one dtype can be moved from `reads` to `writes`, and that the root is a rank."""
        dtype, words = (reads or writes)[0].dtype, None
        for tensor in (*reads, *writes):
            words = words or _why_not(tensor)
            if tensor.dtype is not dtype:
                words = words or f"it takes tensors of one dtype, not of {dtype} and {tensor.dtype}"
        for tensor in writes:
            if not words and not tensor.is_contiguous() and _overlaps(tensor):
                words = "elements of a tensor that is written share memory, as after expand(). Pass a copy"
        if options is not None and not 0 <= options.rootRank < self._num_ranks:
            words = words or f"the root is {options.rootRank}, and there are ranks 0 to {self._num_ranks - 1}"
        if words:
            raise ConfigurationError(f"{kind} on rank {self._rank}: {words}. Nothing was sent.")

    def check_lengths(self, kind: str, rows: Sequence[Tensor], num_elements: int | None) -> None:
        """Make sure that there is a row for each rank: of `num_elements`, or of any length if None."""
        fit = num_elements is None or all(row.numel() == num_elements for row in rows)
        if len(rows) != self._num_ranks or not fit:
            each = "" if num_elements is None else f" of {num_elements} elements"
            raise ConfigurationError(
                f"{kind} on rank {self._rank} needs {self._num_ranks} tensors{each}; it got "
                f"{[row.numel() for row in rows]}."
            )

    def check_own(self, kind: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Make sure that what this rank has for itself is as long as its place for it."""
        sent, expected = reads[self._rank].numel(), writes[self._rank].numel()
        if sent != expected:
            raise ConfigurationError(
                f"{kind} on rank {self._rank}: the input for this rank itself has {sent} elements, and the output "
                f"{expected}. Nothing was sent."
            )

    def at_root(
        self, kind: str, lists: Sequence[Sequence[Tensor]], num_elements: int, options: Any
    ) -> list[Tensor]:
        """Return the rows that only the root passes; none elsewhere."""
        rows = [row for each in lists for row in each]
        if self._rank == options.rootRank:
            self.check_lengths(kind, rows, num_elements)
        elif rows:
            raise ConfigurationError(
                f"{kind} on rank {self._rank}: only rank {options.rootRank}, the root, passes a list."
            )
        return rows


@lru_cache(maxsize=64)
def _can_copy(dtype: torch.dtype) -> bool:
    """Return whether torch copies elements of this dtype; not those of less than a byte, nor quantized ones."""
    try:
        torch.zeros(dtype.itemsize, dtype=torch.uint8, device="cpu").view(dtype).clone()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _why_not(tensor: Tensor) -> str | None:
    """Return why the values of this tensor cannot be moved, in words; None: they can."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return (
            f"it takes no {'nested' if tensor.is_nested else tensor.layout} tensors. Pass their dense parts"
        )
    if tensor.is_meta:
        return "a tensor of the device meta has no values"
    return None if _can_copy(tensor.dtype) else f"torch cannot copy {tensor.dtype}. Pass another dtype"


def _overlaps(tensor: Tensor) -> bool:
    """Return whether elements may share memory, for which a dimension must step less than those inside it reach."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def only(tensors: list[Tensor]) -> Tensor:
    """The tensor of a collective that takes one a rank, passed as lists. ConfigurationError if it has not one."""
    if len(tensors) != 1:
        raise ConfigurationError(f"this collective takes one tensor a rank, not {len(tensors)}.")
    return tensors[0]
