"""Memory that a giver shares with a shadow on its host: gradients take one copy there, and none through a socket.

Rules
1. It has no name, and ends with the last process that has it. The giver sends its descriptor over their Unix socket.
2. It has two halves. Each step's gradients are written into the half that those of the step before are not in. A half
   is free again when the shadow has confirmed that step.
3. The giver waits for no half. Gradients for which none is free take the socket.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_ALIGNED = 64
_MORE = 4096  # of each half, for the few numbers beside gradients


def _aligned(num_bytes: int) -> int:
    """Return the bytes that a tensor of this size takes up."""
    return -(-num_bytes // _ALIGNED) * _ALIGNED


class SharedMemory:
    """The memory of this descriptor, which may be closed then."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, 0)
        self._half = len(self._map) // 2
        self._steps, self._used = [-1, -1], [0, 0]  # of each half: whose gradients it has, and their bytes

    @classmethod
    def sent(cls, end: socket.socket, words: bytes, sizes: Iterable[int]) -> SharedMemory:
        """Make memory for gradients of these sizes, and send words with its descriptor. Raises OSError if it cannot."""
        with os.fdopen(os.memfd_create("paceline-gradients"), "r+b") as file:
            file.truncate(2 * (_MORE + sum(map(_aligned, sizes))))
            socket.send_fds(end, [words], [file.fileno()])
            return cls(file.fileno())

    def put(self, tensors: Sequence[Tensor], step: int, confirmed: int) -> int | None:
        """Copy the tensors of a step. Return where they begin; None: there is no room.

        `confirmed` is the last step whose gradients the shadow does not need any more.
        """
        half = step % 2
        if self._steps[half] != step and self._steps[half] <= confirmed:
            self._steps[half], self._used[half] = step, 0
        begin, num_bytes = self._used[half], sum(_aligned(each.nbytes) for each in tensors)
        if self._steps[half] != step or begin + num_bytes > self._half:
            return None
        self._used[half] += num_bytes
        begin += half * self._half
        for place, each in zip(self.at(begin, tensors), tensors, strict=True):
            place.copy_(each)
        return begin

    def at(self, begin: int, like: Sequence[Tensor]) -> list[Tensor]:
        """Return contiguous tensors in this memory that are like these. Raises ValueError if they go beyond it."""
        found = []
        for each in like:
            if count := each.numel():
                memory = torch.frombuffer(self._map, dtype=each.dtype, count=count, offset=begin)
                begin += _aligned(each.nbytes)
            found.append(memory.view(each.shape) if count else each)
        return found
