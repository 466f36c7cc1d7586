"""The description of one collective, which ranks compare to notice that they are not all in the same one.

It has two encodings. Ranks of one host write it as integers into shared memory, before a barrier that all pass
equally often. Ranks that are joined by a transport send a header of `HEADER_BYTES` bytes with their first messages.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from typing_extensions import Self

from paceline.errors import CollectiveMismatchError
from paceline.schedules.schedule import HEADER_BYTES

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
    "adasum",
)
REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_DTYPE_NAMES = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
# The order is the same on every rank, as they run the same torch.
DTYPES = ("", *sorted(set(_DTYPE_NAMES.values())))

_KIND_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
_DTYPE_NUMBERS = {name: number for number, name in enumerate(DTYPES)}
_REDUCTION_NUMBERS = {"": -1, **{name: number for number, name in enumerate(REDUCTIONS)}}
_HEADER = struct.Struct("<8sQQ16s16s24s48s")
_MAGIC = b"paceln 1"
assert _HEADER.size == HEADER_BYTES


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name without "torch."."""
    return _DTYPE_NAMES[dtype]


@dataclass(frozen=True)
class Descriptor:
    """The description of one collective. If two ranks' differ, they are in different collectives."""

    number: int  # how many collectives came before it in this group
    kind: str  # what was called; one of KINDS where ranks compare integers
    dtype: str = ""  # without "torch."; "" where there is no tensor
    num_elements: int = 0  # of one rank's input
    reduction: str = ""  # one of REDUCTIONS; "" where nothing is reduced
    root: int = -1  # Rank within the group, or -1. Not in the header.
    schedule: str = ""  # Name of the schedule that performs it, or "". Not among the integers.

    @cached_property
    def integers(self) -> array[int]:
        """Return the fields except `number` and `schedule` as NUM_INTEGERS integers of 64 bits."""
        kind, dtype = _KIND_NUMBERS[self.kind], _DTYPE_NUMBERS[self.dtype]
        return array("q", [kind, dtype, self.num_elements, _REDUCTION_NUMBERS[self.reduction], self.root])

    @classmethod
    def from_integers(cls, number: int, integers: Sequence[int]) -> Self:
        kind, dtype, num_elements, reduction, root = integers
        name = REDUCTIONS[reduction] if reduction >= 0 else ""
        return cls(number, KINDS[kind], DTYPES[dtype], num_elements, name, root)

    def to_header(self) -> Tensor:
        """Return the fields except `root` as a header of HEADER_BYTES bytes."""
        texts = (text.encode() for text in (self.dtype, self.reduction, self.kind, self.schedule))
        return torch.frombuffer(
            bytearray(_HEADER.pack(_MAGIC, self.number, self.num_elements, *texts)), dtype=torch.uint8
        )

    @classmethod
    def from_header(cls, header: Tensor) -> Self | None:
        """Parse a header; None if it is not one. Only for messages: nothing in it is trusted."""
        magic, number, num_elements, *texts = _HEADER.unpack(header.numpy().tobytes())
        if magic != _MAGIC:
            return None
        dtype, reduction, kind, schedule = (
            "".join(c if c.isprintable() else "?" for c in text.rstrip(b"\0").decode("ascii", "replace"))
            for text in texts
        )
        return cls(number, kind, dtype, num_elements, reduction, schedule=schedule or "?")

    def __str__(self) -> str:
        if self.schedule:
            reduction = f"{self.reduction} of " if self.reduction else ""
            return (
                f"{self.kind} number {self.number} "
                f"({reduction}{self.num_elements:,} {self.dtype}, by {self.schedule})"
            )
        parts = [f"{self.kind} number {self.number}"]
        if self.dtype:
            size_bytes = self.num_elements * getattr(torch, self.dtype).itemsize
            parts.append(f"of {self.num_elements} elements of {self.dtype} ({_size(size_bytes)})")
        if self.reduction:
            parts.append(self.reduction)
        if self.root >= 0:
            parts.append(f"root {self.root}")
        return ", ".join(parts)


@lru_cache(maxsize=256)
def described(
    kind: str, dtype: torch.dtype | None = None, num_elements: int = 0, reduction: str = "", root: int = -1
) -> Descriptor:
    """Describe a collective of one host, by one rank's input or by its output if that is smaller. It has no number."""
    return Descriptor(0, kind, "" if dtype is None else _DTYPE_NAMES[dtype], num_elements, reduction, root)


NUM_INTEGERS = len(described(KINDS[0]).integers)


def mismatch(
    mine: Descriptor, number: int, index: int, ranks: Sequence[int], announced: Sequence[memoryview]
) -> CollectiveMismatchError:
    """Return the error for ranks that announced, as integers, different collectives of this `number`; it names two."""
    other = next(place for place, integers in enumerate(announced) if integers != announced[index])
    theirs = Descriptor.from_integers(number, announced[other].tolist())
    return CollectiveMismatchError(
        f"rank {ranks[index]} launched {replace(mine, number=number)} while rank {ranks[other]} launched {theirs}. "
        "Every rank of a process group launches the same collectives in the same order, with equal shapes and dtypes. "
        "Look for a branch that only some ranks take. The contents of both tensors are undefined, and the group can no "
        "longer be used."
    )


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB" if size_bytes >= 2**20 else f"{size_bytes / 2**10:.1f} KiB"
