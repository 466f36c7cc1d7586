"""An arena: memory of one rank that every rank of its host has mapped, and an allocator of tensors in it.

Rules
1. An arena is a memfd: it has no name, belongs to no folder and goes with its last user, also after SIGKILL. The size
   of /dev/shm, 64 MB in many containers, does not limit it.
2. Its size is address space, not memory: a page costs something once it is touched. Every rank maps the arenas of all
   ranks of its host. So they agree on a size that the rank with the least address space can afford.
3. A tensor allocated here keeps the mapping alive; its region is free again when the tensor is gone.
4. Only its owner allocates in an arena. Peers read and write where the owner has announced that its tensor lies.

At its front lie status words, what a rank tells the others of its host outside any message (`Status`):

    offset     words            written by their owner only, but for one
    0          nonce            16 random bytes, by which a peer checks that it has mapped this very memory
    64         arrivals         at how many barriers its owner has arrived, modulo 2^32; peers wait for it to grow
    96         sleepers         1 if a peer may sleep until it grows: peers write it, and the owner resets it
    128        given_up         0, or 1 + the rank that its owner considers lost, or that its owner has left
    192, 2112  announcements    integers for the ranks that meet at a barrier: for even and for odd numbers, 240 each

A rank is never more than one barrier ahead of the slowest, so two announcements suffice.
"""

from __future__ import annotations

import bisect
import collections
import mmap
import os
import resource
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.transports.shared_memory import futex

ALIGNMENT = 4096
MOST_BYTES = 64 * 2**30
_USER_ADDRESSES_BYTES = 2**46  # half of what a process has on the smallest 64-bit machines
# One group takes at most this part of what is left, so that hundreds find something; of a limit, a larger one.
_PART, _PART_OF_LIMIT = 64, 16
SIZE_BYTES = 4096
NONCE_BYTES = 16
NUM_ANNOUNCED = 240
_ROW_BYTES = 8 * NUM_ANNOUNCED
_HAS_LEFT = 2**32 - 1
_ARRIVALS, _SLEEPERS, _GIVEN_UP, _ANNOUNCEMENTS = 64, 96, 128, 192


@dataclass(frozen=True)
class Region:
    """Bytes [start, start + size_bytes) of an arena."""

    start: int
    size_bytes: int


@dataclass(frozen=True)
class Budget:
    """The bytes that a process can afford for the arenas of one group: for all that it maps, and for its own."""

    together_bytes: int
    own_bytes: int

    @classmethod
    def of_this_process(cls) -> Budget:
        """Return the budget by this process's limits (RLIMIT_AS, RLIMIT_FSIZE) and what it has used up."""
        address_limit, file_limit = (
            resource.getrlimit(which)[0] for which in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE)
        )
        most, part = _USER_ADDRESSES_BYTES, _PART
        if address_limit < _USER_ADDRESSES_BYTES and address_limit != resource.RLIM_INFINITY:
            most, part = address_limit, _PART_OF_LIMIT
        own = MOST_BYTES if file_limit == resource.RLIM_INFINITY else min(MOST_BYTES, file_limit)
        return cls(max(most - _used_addresses_bytes(), 0) // part, own)


def size_within(budgets: Sequence[Budget]) -> int:
    """Return the size of the arenas of processes with these budgets, or 0 if they cannot share memory."""
    num_arenas = len(budgets)
    size = min(min(each.together_bytes // num_arenas, each.own_bytes) for each in budgets)
    return size // ALIGNMENT * ALIGNMENT if size >= least_bytes(num_arenas) else 0


def least_bytes(num_ranks: int) -> int:
    """Return the bytes that collectives and messages between so many ranks need in each arena."""
    return 8 * 2**20 + num_ranks * 2 * 2**20


def _used_addresses_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class Arena:
    """One rank's memory, mapped here from a memfd, which is taken over and closed; or of this process alone.

    The first to map it gives it its size. `reserved_bytes` at the front are not for tensors. Raises OSError if there is
    not so much address space.
    """

    def __init__(self, fd: int | None, size_bytes: int, reserved_bytes: int) -> None:
        self.size_bytes = size_bytes
        if fd is None:
            self._map = mmap.mmap(-1, size_bytes)
            self._lay_out(reserved_bytes)
            return
        try:
            if os.fstat(fd).st_size < size_bytes:
                os.ftruncate(fd, size_bytes)
            self._map = mmap.mmap(
                fd, self.size_bytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_NORESERVE", 0)
            )
        finally:
            os.close(fd)
        self._lay_out(reserved_bytes)

    def _lay_out(self, reserved_bytes: int) -> None:
        self.bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.address: int = self.bytes.ctypes.data
        self._all = torch.from_numpy(self.bytes)
        self._lock = threading.Lock()
        self._starts = [_round_up(reserved_bytes)]  # of the free regions, ascending
        self._sizes = [self.size_bytes - self._starts[0]]
        self._returned: collections.deque[Region] = collections.deque()  # not yet among the free ones

    @staticmethod
    def create() -> int:
        """Return a new, empty memfd."""
        return os.memfd_create("paceline", os.MFD_CLOEXEC)

    def tensor(self, region: Region, dtype: torch.dtype) -> Tensor:
        """Alias a region as a 1-D tensor. It keeps the mapping alive, not the region allocated."""
        return self._all[region.start : region.start + region.size_bytes].view(dtype)

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a zeroed 1-D tensor in this arena; raises MemoryError if its address space is used up."""
        size_bytes = _round_up(max(num_elements * dtype.itemsize, 1))
        start = self._take(size_bytes)
        base = self.bytes[start : start + max(num_elements * dtype.itemsize, 1)]
        weakref.finalize(base, self._give_back, start, size_bytes).atexit = False
        if not num_elements:
            return torch.zeros(0, dtype=dtype)
        return torch.from_numpy(base).view(dtype).zero_()

    def region_of(self, tensor: Tensor) -> Region | None:
        """Return the region of a contiguous tensor in this arena, or None if it lies elsewhere."""
        start = tensor.data_ptr() - self.address
        size_bytes = tensor.numel() * tensor.element_size()
        if start >= 0 and start + size_bytes <= self.size_bytes:
            return Region(start, size_bytes)
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
            f"the memory shared between the ranks of this host has no {size_bytes} bytes in a row left of its "
            f"{self.size_bytes}. Free tensors of allocate_tensor, or allocate smaller ones."
        )

    def _give_back(self, start: int, size_bytes: int) -> None:
        """Return a region to the arena. A finalizer calls this, even within `_take`, so it takes no lock."""
        self._returned.append(Region(start, size_bytes))

    def _free(self, region: Region) -> None:
        index = bisect.bisect(self._starts, region.start)
        self._starts.insert(index, region.start)
        self._sizes.insert(index, region.size_bytes)
        self._join(index)
        if index:
            self._join(index - 1)

    def _join(self, index: int) -> None:
        """Merge a free region with the next one, if they touch."""
        starts, sizes = self._starts, self._sizes
        if index + 1 < len(starts) and starts[index] + sizes[index] == starts[index + 1]:
            sizes[index] += sizes[index + 1]
            del starts[index + 1], sizes[index + 1]


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


class Status:
    """One rank's status, read and written from any rank of the host."""

    def __init__(self, arena: Arena) -> None:
        # Views that Python reads and writes in a third of the time that an array's element takes.
        self._arrivals = arena.bytes[_ARRIVALS : _ARRIVALS + 4].data.cast("I")
        self._sleepers = arena.bytes[_SLEEPERS : _SLEEPERS + 4].data.cast("I")
        self._given_up = arena.bytes[_GIVEN_UP : _GIVEN_UP + 4].data.cast("I")
        rows = (_ANNOUNCEMENTS, _ANNOUNCEMENTS + _ROW_BYTES)
        # What its owner announces for even barriers, and for odd ones.
        self.announcements = [arena.bytes[row : row + _ROW_BYTES].data.cast("q") for row in rows]
        self._address = arena.address + _ARRIVALS

    def arrive(self, barrier: int) -> None:
        """Publish everything written before, arrive at barrier number `barrier` and wake sleeping ranks. Owner only.

        A wake-up takes as long as all the rest, so it is left out where no peer sleeps. A rank says that it is about to
        sleep before it looks for the last time. The word is reset before the arrival; later it may be
        of one that waits for the next.
        """
        if has_sleepers := self._sleepers[0]:
            self._sleepers[0] = 0
        futex.fence()
        self._arrivals[0] = barrier % 2**32
        futex.full_fence()
        if has_sleepers or self._sleepers[0]:
            futex.wake(self._address)

    def has_arrived(self, barrier: int) -> bool:
        """Return whether the arena's owner is at barrier number `barrier` or beyond."""
        return (self._arrivals[0] - barrier) % 2**32 < 2**31

    def wait_for(self, barrier: int, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until its owner has arrived; returns whether it has. May return early."""
        seen = self._arrivals[0]
        if (seen - barrier) % 2**32 >= 2**31:
            self._sleepers[0] = 1
            futex.full_fence()
            futex.wait_while(self._address, seen, timeout_s)
            return self.has_arrived(barrier)
        futex.fence()
        return True

    def give_up(self, lost_rank: int) -> None:
        """Tell the others that this rank will not arrive any more, and which rank it considers lost. Owner only."""
        self._given_up[0] = 1 + lost_rank
        futex.wake(self._address)

    def wake(self) -> None:
        """Wake the ranks that wait for this arena's owner, so that they check its state. Any rank may call it."""
        futex.wake(self._address)

    @property
    def given_up_because_of(self) -> int | None:
        value = self._given_up[0]
        return value - 1 if value not in {0, _HAS_LEFT} else None

    def leave(self) -> None:
        """Tell the others that this rank's program ended, or destroyed the group, of its own accord. Owner only."""
        if not self._given_up[0]:
            self._given_up[0] = _HAS_LEFT
            futex.wake(self._address)

    @property
    def has_left(self) -> bool:
        """Return whether the arena's owner left without an error of the group."""
        return self._given_up[0] == _HAS_LEFT
