"""What a rank is about to do, in words that the others can compare with their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import CollectiveMismatchError

KINDS = (
    "all-reduce",
    "broadcast",
    "all-gather",
    "reduce-scatter",
    "reduce",
    "barrier",
    "gather",
    "scatter",
    "all-to-all",
)
DTYPES = tuple(
    sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
)  # the same on every rank, as they run the same torch
REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


@dataclass(frozen=True)
class Operation:
    """One collective, as every rank of the group must describe it alike.

    Attributes:
        number: Its place in the group's sequence of collectives.
        kind: Index into KINDS.
        dtype: Index into DTYPES.
        num_elements: Of one rank's input.
        reduction: Index into REDUCTIONS, or -1.
        root: Rank within the group, or -1.
    """

    number: int
    kind: int
    dtype: int = 0
    num_elements: int = 0
    reduction: int = -1
    root: int = -1

    def words(self) -> list[int]:
        return [self.number, self.kind, self.dtype, self.num_elements, self.reduction, self.root]

    def __str__(self) -> str:
        parts = [f"{KINDS[self.kind]} number {self.number}"]
        if self.kind != KINDS.index("barrier"):
            dtype = DTYPES[self.dtype]
            size_bytes = self.num_elements * dtype.itemsize
            parts.append(
                f"of {self.num_elements} elements of {str(dtype).removeprefix('torch.')} ({_size(size_bytes)})"
            )
        if self.reduction >= 0:
            parts.append(REDUCTIONS[self.reduction])
        if self.root >= 0:
            parts.append(f"root {self.root}")
        return ", ".join(parts)


NUM_WORDS = len(Operation(0, 0).words())


def operation(
    number: int, kind: str, tensor: Tensor | None = None, reduction: str = "", root: int = -1
) -> Operation:
    """Describe a collective.

    Args:
        number: Its place in the sequence.
        kind: One of KINDS.
        tensor: Of one rank's part, for its dtype and number of elements.
        reduction: One of REDUCTIONS, where it reduces.
        root: Rank within the group, where it has one.
    """
    return Operation(
        number,
        KINDS.index(kind),
        0 if tensor is None else DTYPES.index(tensor.dtype),
        0 if tensor is None else tensor.numel(),
        REDUCTIONS.index(reduction) if reduction else -1,
        root,
    )


def check_agreement(
    mine: Operation, ranks: Sequence[int], notices: Sequence[Sequence[int]], my_rank: int
) -> None:
    """Compare what all ranks of a host are about to do.

    Raises:
        CollectiveMismatchError: Two differ; names both. Raised on every rank of the host.
    """
    words = mine.words()
    for rank, notice in zip(ranks, notices, strict=True):
        if list(notice[:NUM_WORDS]) != words:
            theirs = Operation(*notice[:NUM_WORDS])
            raise CollectiveMismatchError(
                f"rank {my_rank} launched {mine} while rank {rank} launched {theirs}. Every rank of a process group "
                "launches the same collectives in the same order, with equal shapes and dtypes. Look for a branch that "
                "only some ranks take. The contents of both tensors are undefined, and the group can no longer be used."
            )


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB" if size_bytes >= 2**20 else f"{size_bytes / 2**10:.1f} KiB"
