"""Sums what ranks push, always in the order of the ranks. So every run has the same bits, whatever arrives first."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline_servers.wire import DType

Bytes = NDArray[np.uint8]
_NATIVE: dict[DType, Any] = {DType.FLOAT32: np.float32, DType.FLOAT64: np.float64}


class OrderedSum:
    """The sum ((g0 + g1) + g2) + ..., as one process would compute it. `arrived` holds the ranks that have pushed.

    Types of 16 bits are added up in float32 and rounded once, to the nearest even.
    """

    def __init__(self, num_ranks: int, dtype: DType) -> None:
        self._num_ranks = num_ranks
        self._dtype = dtype
        self._early: dict[int, Bytes] = {}  # by rank: pushes that wait for those of lower ranks
        self._next = 0
        self._sum: NDArray[Any] | None = None
        self.arrived: set[int] = set()

    def add(self, rank: int, pushed: Bytes) -> None:
        """Add the push of a rank. `pushed` belongs to this object from now on."""
        self.arrived.add(rank)
        self._early[rank] = pushed
        while self._next in self._early:
            values = _widened(self._early.pop(self._next), self._dtype)
            if self._sum is None:
                self._sum = values
            else:
                np.add(self._sum, values, out=self._sum)
            self._next += 1

    @property
    def held_bytes(self) -> int:
        """Return the bytes of memory that the pushes take."""
        return sum(early.nbytes for early in self._early.values()) + (
            0 if self._sum is None else self._sum.nbytes
        )

    @property
    def is_complete(self) -> bool:
        return self._next == self._num_ranks

    def result(self) -> Bytes:
        """Return the sum, in the dtype of the pushes."""
        assert self._sum is not None, "a rank has pushed"
        return _narrowed(self._sum, self._dtype)


def _widened(pushed: Bytes, dtype: DType) -> NDArray[Any]:
    if dtype in _NATIVE:
        return pushed.view(_NATIVE[dtype])
    if dtype is DType.FLOAT16:
        return pushed.view(np.float16).astype(np.float32)
    return (pushed.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _narrowed(values: NDArray[Any], dtype: DType) -> Bytes:
    if dtype in _NATIVE:
        return values.view(np.uint8)
    if dtype is DType.FLOAT16:
        with np.errstate(over="ignore"):  # it becomes infinite, as it should
            return values.astype(np.float16).view(np.uint8)
    bits = values.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    found: Bytes = np.where(np.isnan(values), np.uint16(0x7FC0), rounded).astype(np.uint16).view(np.uint8)
    return found
