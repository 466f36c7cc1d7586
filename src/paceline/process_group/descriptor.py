"""What a rank says about the collective it is in, beside its first messages."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Self

from paceline.schedules.part import HEADER_BYTES

_FORMAT = struct.Struct("<8sQQ16s16s24s48s")
_MAGIC = b"paceln 1"
assert _FORMAT.size == HEADER_BYTES


@dataclass(frozen=True)
class Descriptor:
    """Which collective: equal on all ranks, or they do not belong together."""

    sequence: int
    """How many collectives came before it in this group."""
    operation: str
    op: str
    """SUM, MAX, ...; empty where nothing is reduced."""
    dtype: str
    num_elements: int
    schedule: str

    def to_header(self) -> Tensor:
        """HEADER_BYTES bytes."""
        words = (word.encode() for word in (self.dtype, self.op, self.operation, self.schedule))
        return torch.frombuffer(
            bytearray(_FORMAT.pack(_MAGIC, self.sequence, self.num_elements, *words)), dtype=torch.uint8
        )

    @classmethod
    def from_header(cls, header: Tensor) -> Self | None:
        """What a header says; None if it is not one. Only for messages: nothing in it is trusted."""
        magic, sequence, num_elements, *words = _FORMAT.unpack(header.numpy().tobytes())
        if magic != _MAGIC:
            return None
        dtype, op, operation, schedule = (
            "".join(c if c.isprintable() else "?" for c in word.rstrip(b"\0").decode("ascii", "replace"))
            for word in words
        )
        return cls(sequence, operation, op, dtype, num_elements, schedule)

    def __str__(self) -> str:
        op = f"{self.op} of " if self.op else ""
        by = f", by {self.schedule}" if self.schedule else ""
        return f"{self.operation} number {self.sequence} ({op}{self.num_elements:,} {self.dtype}{by})"
