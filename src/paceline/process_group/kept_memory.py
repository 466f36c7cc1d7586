"""Memory kept from call to call, as much as was lately needed: what a large message takes once does not stay."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LOOKS_AFTER = 64  # calls: some steps of a model with a handful of buckets


class KeptMemory:
    """One piece of memory, used by one call after another.

    Grows when a call needs more. After `LOOKS_AFTER` calls that have used no more than half of it, it shrinks to what
    they have used.

    Args:
        allocate: Returns so many uninitialized bytes, shape (N,), uint8.
    """

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._memory: Tensor | None = None
        self._num_calls = self._most_bytes = 0

    def take(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Uninitialized, shape (num_elements,); until the next call."""
        num_bytes = num_elements * dtype.itemsize
        self._num_calls += 1
        self._most_bytes = max(self._most_bytes, num_bytes)
        kept_bytes = -1 if self._memory is None else self._memory.numel()
        is_too_large = self._num_calls > LOOKS_AFTER and 2 * self._most_bytes <= kept_bytes
        if num_bytes > kept_bytes or is_too_large:
            self._memory = None  # its place may be part of the new one's
            self._memory = self._allocate(self._most_bytes)
        if self._num_calls > LOOKS_AFTER:
            self._num_calls, self._most_bytes = 0, num_bytes
        assert self._memory is not None
        return self._memory[:num_bytes].view(dtype)
