"""The memory through which ranks of a host exchange tensors that lie outside the arena, piece by piece.

Rules
1. A tensor that lies in its owner's arena is worked on where it is. Any other goes through the owner's staging area,
   piece by piece, and only what others read or write of it.
2. The staging area is two slots, taken in turn by the pieces of all collectives. A piece is put into its slot before a
   barrier. Other ranks work on it before the next barrier; if there is only one, it may use the piece up. Meanwhile the
   owner fills the other slot with the next piece. So there is one barrier per piece, and pieces stay in the cache.
3. Every rank goes through the same turns: the number of pieces follows from what all have announced.
4. A slot is used again after two pieces; the barrier between them proves that its readers are done. That holds across
   collectives, too. The last piece may still be read when the next collective fills the other slot and waits at its
   first barrier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from paceline.process_group.descriptor import NUM_INTEGERS, Descriptor, mismatch
from paceline.process_group.executor import KeptMemory
from paceline.transports.shared_memory import Host, HostBarrier
from paceline.transports.shared_memory.arena import NUM_ANNOUNCED, Region

PIECE_BYTES = 1024 * 1024  # a slot's; in the cache until it is copied out. Less only adds calls and barriers
STAGING_BYTES = 2 * PIECE_BYTES
_STAGED, _GIVES_NOTHING = -1, -2
_MOST_KNOWN = 64  # views of slots that are kept
_ALIGNMENT = 64  # of a lane
MOST_NUMBERS = NUM_ANNOUNCED - NUM_INTEGERS  # that a rank announces beside a descriptor

Span = tuple[int, int]  # elements [first, last) of a message
Copy = Callable[[Tensor, Tensor], int]  # between a piece of a message and its slot; returns how many bytes


class Staging:
    """This rank's side of the staging of one host's collectives, one after another."""

    def __init__(self, host: Host, barrier: HostBarrier) -> None:
        self._me = host.index
        self._barrier = barrier
        self._ranks = [neighbour.rank for neighbour in host.neighbours]
        self._areas = [neighbour.arena for neighbour in host.neighbours]
        # By the parity of a barrier: what every rank announces before it, cut into a descriptor and further numbers.
        rows = [
            [neighbour.status.announcements[parity] for neighbour in host.neighbours] for parity in (0, 1)
        ]
        self._descriptors = [[row[:NUM_INTEGERS] for row in of_all] for of_all in rows]
        self._numbers = [[row[NUM_INTEGERS:] for row in of_all] for of_all in rows]
        self._kept = host.me.arena.allocate(STAGING_BYTES, torch.uint8)
        region = host.me.arena.region_of(self._kept)
        assert region is not None
        self._start = region.start  # the first allocation: at the same offset in every arena
        self._whole = KeptMemory(lambda num_bytes: host.me.arena.allocate(num_bytes, torch.uint8))
        self._turn = 0  # which slot the next piece takes
        self._number = 0  # of the last collective
        self._known_slots: dict[tuple[int, torch.dtype, int], list[Tensor]] = {}
        self._known_lanes: dict[tuple[object, ...], list[Tensor]] = {}
        # Of a slot that has a lane for each rank
        self.lane_bytes = PIECE_BYTES // len(self._ranks) // _ALIGNMENT * _ALIGNMENT
        self.copied_bytes = 0  # into and out of staging so far; a bucket that lives in the arena adds nothing

    def gather(self, what: Descriptor, flat: Tensor, enters: bool = True) -> list[Tensor]:
        """Return views of every rank's `flat`, for one collective. The own one is stale unless it `enters`."""
        slots = self.slots(self._turn, flat.dtype, flat.numel())
        self._turn ^= 1
        if enters:
            slots[self._me].copy_(flat)
            self.copied_bytes += flat.nbytes
        self._open(what)
        return slots

    def is_resident(self, flat: Tensor) -> bool:
        """Return whether other ranks can work on the tensor where it is."""
        return self._areas[self._me].region_of(flat) is not None

    @contextmanager
    def resident(self, flat: Tensor) -> Iterator[Tensor]:
        """Yield a copy of the whole of `flat` that is resident, and copy it back."""
        copy = self._whole.take(flat.numel(), flat.dtype).copy_(flat)
        yield copy
        flat.copy_(copy)
        self.copied_bytes += 2 * flat.nbytes

    def all_of(self, what: Descriptor, flat: Tensor) -> list[Tensor]:
        """Begin a collective of tensors that are all resident; returns every rank's."""
        region = self._areas[self._me].region_of(flat)
        assert region is not None
        starts = self.open(what, region.start)
        return self._views(starts, (0, flat.numel()), flat.dtype)

    def stream(
        self,
        what: Descriptor,
        flat: Tensor,  # this rank's tensor
        # Called for each piece with its range in `flat` and all ranks' views of it.
        work: Callable[[Span, Sequence[Tensor]], None],
        # Copies of a piece of `flat` into its slot what others need; None: they need nothing.
        enter: Copy | None,
        leave: Copy | None = None,  # copies of a slot to its piece what others have changed; None: nothing
    ) -> None:
        """Perform a collective of tensors of one length, some of which may be staged."""
        region = self._areas[self._me].region_of(flat)
        start = _GIVES_NOTHING if enter is None else _STAGED if region is None else region.start
        spans = spans_of(flat.numel(), flat.element_size())
        if start == _STAGED and enter is not None:
            self._copy_piece(enter, flat, spans, 0)
        starts = self.open(what, start)
        if _STAGED not in starts:
            spans = [(0, flat.numel())] if flat.numel() else []
        # After the last piece, too, where others write what a slot's owner copies out, or use a tensor where it lies.
        # Slots that are only read need none (rule 4).
        ends_with_barrier = leave is not None or max(starts) >= 0
        for number, span in enumerate(spans):
            self._turn ^= 1
            if start == _STAGED and enter is not None:
                self._copy_piece(enter, flat, spans, number + 1)
            work(span, self._views(starts, span, flat.dtype))
            if ends_with_barrier or number + 1 < len(spans):
                self.wait(what)
            if start == _STAGED and leave is not None:
                self._turn ^= 1
                self._copy_piece(leave, flat, spans, number)
                self._turn ^= 1

    def _copy_piece(self, how: Copy, flat: Tensor, spans: Sequence[Span], number: int) -> None:
        """Copy between piece `number` of `flat`, if it exists, and this rank's slot for it."""
        if number < len(spans):
            first, last = spans[number]
            self.copied_bytes += how(
                flat[first:last], self.slots(self._turn, flat.dtype, last - first)[self._me]
            )

    def _views(self, starts: Sequence[int], span: Span, dtype: torch.dtype) -> list[Tensor]:
        """Return every rank's view of the piece that has entered: in its tensor, or in its slot for that piece."""
        first, last = span

        def view(index: int, start: int) -> Tensor:
            if start >= 0:
                region = Region(start + first * dtype.itemsize, (last - first) * dtype.itemsize)
                return self._areas[index].tensor(region, dtype)
            return self.slots(self._turn ^ 1, dtype, last - first if start == _STAGED else 0)[index]

        return [view(index, start) for index, start in enumerate(starts)]

    def exchange(
        self,
        what: Descriptor,
        # First how many pieces this rank has; up to MOST_NUMBERS in all, on all ranks as many.
        numbers: Sequence[int],
        # Copies a piece, by its number, into the slot of a turn; returns how many bytes.
        enter: Callable[[int, int], int],
        work: Callable[[int, int], None],  # takes a piece, by its number, from the slots of a turn
        # Is given every rank's `numbers` before anything is taken; may raise
        check: Callable[[Sequence[Sequence[int]]], None] | None = None,
    ) -> None:
        """Perform a collective in which all stage their inputs, in as many pieces as the rank with the most has."""
        if numbers[0]:
            self.copied_bytes += enter(0, self._turn)
        announced = [row[: len(numbers)].tolist() for row in self._open(what, numbers)]
        if check is not None:
            check(announced)
        most = max(announced)[0]
        for number in range(most):
            self._turn ^= 1
            if number + 1 < most:
                self.copied_bytes += enter(number + 1, self._turn)
            work(number, self._turn ^ 1)
            if number + 1 < most:  # nothing else is used than slots that are only read (rule 4)
                self.wait(what)

    def slots(self, turn: int, dtype: torch.dtype, num_elements: int) -> list[Tensor]:
        """Return the first elements of every rank's slot."""
        key = (turn, dtype, num_elements)
        found = self._known_slots.get(key)
        if found is None:
            if len(self._known_slots) >= _MOST_KNOWN:
                self._known_slots.clear()
            region = Region(self._start + turn * PIECE_BYTES, num_elements * dtype.itemsize)
            found = self._known_slots[key] = [arena.tensor(region, dtype) for arena in self._areas]
        return found

    def lanes(self, turn: int, rows: Sequence[Tensor], are_mine: bool) -> list[Tensor]:
        """Return where rows lie in the slots of a turn, which have a lane of `lane_bytes` for each rank.

        `are_mine`: of this rank's slot the lanes for the others; otherwise of theirs those for this rank.
        """
        if not rows:
            return []
        key = (turn, are_mine, rows[0].dtype, *map(Tensor.numel, rows))
        found = self._known_lanes.get(key)
        if found is None:
            if len(self._known_lanes) >= _MOST_KNOWN:
                self._known_lanes.clear()
            found = self._known_lanes[key] = self._view_lanes(turn, rows, are_mine)
        return found

    def _view_lanes(self, turn: int, rows: Sequence[Tensor], are_mine: bool) -> list[Tensor]:
        others = [index for index in range(len(self._ranks)) if index != self._me]
        views = []
        for other, row in zip(others, rows, strict=True):
            owner, lane = (self._me, other) if are_mine else (other, self._me)
            region = Region(self._start + turn * PIECE_BYTES + lane * self.lane_bytes, row.nbytes)
            views.append(self._areas[owner].tensor(region, row.dtype))
        return views

    def open(self, what: Descriptor, number: int = _GIVES_NOTHING) -> list[int]:
        """Wait for all, compare descriptors, and return every rank's `number`."""
        return [numbers[0] for numbers in self._open(what, (number,))]

    def _open(self, what: Descriptor, numbers: Sequence[int] = ()) -> list[memoryview]:
        """Open a collective with several numbers; what lies behind them belongs to earlier collectives."""
        self._number += 1
        parity = (self._barrier.number + 1) % 2
        descriptors, announced = self._descriptors[parity], self._numbers[parity]
        mine = descriptors[self._me]
        mine[:] = what.integers
        for index, number in enumerate(numbers):
            announced[self._me][index] = number
        self.wait(what)
        if descriptors.count(mine) < len(descriptors):
            raise mismatch(what, self._number, self._me, self._ranks, descriptors)
        return announced

    def wait(self, what: Descriptor) -> None:
        self._barrier.wait(lambda: f"in {replace(what, number=self._number)}")


def spans_of(num_elements: int, bytes_each: int) -> list[Span]:
    """Cut a message into pieces that fit a slot, in which an element takes `bytes_each`."""
    step = max(PIECE_BYTES // bytes_each, 1)
    return [(first, min(first + step, num_elements)) for first in range(0, num_elements, step)]
