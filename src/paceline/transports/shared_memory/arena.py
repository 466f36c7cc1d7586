"""An arena: memory of one rank that every rank of its host has mapped, and an allocator of tensors in it.

Rules
1. An arena is a memfd: it has no name, belongs to no folder and goes with its last user, also after SIGKILL. The size
   of /dev/shm, 64 MB in many containers, does not limit it.
2. Its size is address space, not memory: a page costs something once it is touched.
3. A tensor allocated here keeps the mapping alive; its place is free again when the tensor is gone.
4. Only its owner allocates in an arena. Peers read and write where the owner has announced that its tensor lies.
"""

from __future__ import annotations

import bisect
import collections
import mmap
import os
import threading
import weakref
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 4096
ADDRESS_SPACE_BYTES = 64 * 2**30


@dataclass(frozen=True)
class Place:
    """Bytes [start, start + size_bytes) of an arena."""

    start: int
    size_bytes: int


class Arena:
    """One rank's memory, mapped here.

    Args:
        fd: The memfd; taken over, and closed.
        reserved_bytes: What lies at the front and is not for tensors.
    """

    def __init__(self, fd: int, reserved_bytes: int) -> None:
        try:
            self.size_bytes = os.fstat(fd).st_size
            self._map = mmap.mmap(
                fd, self.size_bytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_NORESERVE", 0)
            )
        finally:
            os.close(fd)
        self.bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.address: int = self.bytes.ctypes.data
        self._all = torch.from_numpy(self.bytes)
        self._lock = threading.Lock()
        self._starts = [_round_up(reserved_bytes)]  # of the free places, ascending
        self._sizes = [self.size_bytes - self._starts[0]]
        self._returned: collections.deque[Place] = collections.deque()  # not yet among the free ones

    @staticmethod
    def create(size_bytes: int = ADDRESS_SPACE_BYTES) -> int:
        """Return a new memfd of this much address space."""
        fd = os.memfd_create("paceline", os.MFD_CLOEXEC)
        os.ftruncate(fd, size_bytes)
        return fd

    def tensor(self, place: Place, dtype: torch.dtype) -> Tensor:
        """Alias a place as a 1-D tensor. It keeps the mapping alive, not the place taken."""
        return self._all[place.start : place.start + place.size_bytes].view(dtype)

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a zeroed 1-D tensor in this arena.

        Raises:
            MemoryError: The arena's address space is used up.
        """
        size_bytes = _round_up(max(num_elements * dtype.itemsize, 1))
        start = self._take(size_bytes)
        base = self.bytes[start : start + max(num_elements * dtype.itemsize, 1)]
        weakref.finalize(base, self._give_back, start, size_bytes).atexit = False
        if not num_elements:
            return torch.zeros(0, dtype=dtype)
        tensor = _as_tensor(base, dtype)
        return tensor.zero_()

    def place_of(self, tensor: Tensor) -> Place | None:
        """Where a contiguous tensor lies in this arena, or None when it does not."""
        start = tensor.data_ptr() - self.address
        size_bytes = tensor.numel() * tensor.element_size()
        if start >= 0 and start + size_bytes <= self.size_bytes:
            return Place(start, size_bytes)
        return None

    def _take(self, size_bytes: int) -> int:
        with self._lock:
            while self._returned:
                self._free(self._returned.popleft())
            for index, free in enumerate(self._sizes):
                if free >= size_bytes:
                    start = self._starts[index]
                    self._starts[index] += size_bytes
                    self._sizes[index] -= size_bytes
                    return start
        raise MemoryError(
            f"the memory shared between the ranks of this host has no {size_bytes} bytes in a row left "
            f"of its {self.size_bytes}"
        )

    def _give_back(self, start: int, size_bytes: int) -> None:
        """Called by a finalizer: wherever garbage is collected, also within `_take`. So it takes no lock."""
        self._returned.append(Place(start, size_bytes))

    def _free(self, place: Place) -> None:
        index = bisect.bisect(self._starts, place.start)
        self._starts.insert(index, place.start)
        self._sizes.insert(index, place.size_bytes)
        self._join(index)
        if index:
            self._join(index - 1)

    def _join(self, index: int) -> None:
        """Make one of a free place and the next, if they touch."""
        if (
            index + 1 < len(self._starts)
            and self._starts[index] + self._sizes[index] == self._starts[index + 1]
        ):
            self._sizes[index] += self._sizes[index + 1]
            del self._starts[index + 1], self._sizes[index + 1]


def _as_tensor(base: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(base).view(dtype)


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
