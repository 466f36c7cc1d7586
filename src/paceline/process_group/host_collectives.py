"""Collectives between the ranks of one host, through memory that they share.

Rules
1. Every collective begins with a barrier at which the ranks compare what they are about to do.
2. A tensor that lies in its owner's arena is worked on where it is. Any other goes through the owner's staging area,
   piece by piece.
3. In a reduction, rank i of k folds the i-th of k shares: it reads that share from all ranks and writes the result to
   all of them. Each element is computed once, so all ranks end with the same bits.
4. Between the barriers of a collective peers may touch a rank's staging area; outside them nobody does.
5. The result of a small all-reduce is folded by every rank for itself, in one order, after a single barrier. Its input
   lies in one of two slots in turn: a rank is at most one collective ahead of those still reading.
6. What goes on to other hosts goes in one piece, as they may stage where we do not: it is copied into the arena whole.

Cost:
    All-reduce of N bytes on k ranks: each reads N and writes N, whatever k; nothing is copied in or out under rule 2.

Source:
    The share-wise scheme is the first and last phase of Goyal et al. 2017, section 4, over memory instead of NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from paceline.process_group.descriptor import NUM_INTEGERS, Descriptor, check_agreement
from paceline.process_group.folds import Fold
from paceline.transports.shared_memory import Host, HostBarrier
from paceline.transports.shared_memory.arena import Place

CHUNK_BYTES = 512 * 1024  # folded and handed on while it is in the cache
SMALL_BYTES = 64 * 1024
STAGING_BYTES = 4 * 2**20
_STAGED = -1

Across = Callable[[Tensor], None]  # reduces one share over the hosts, in place


class HostCollectives:
    """What the ranks of one host do together. Every method is collective over them and blocks.

    Args:
        host: The ranks.
        barrier: Of these ranks.
        num_shares: How many of them fold; the first ones. Fewer than all where another host has fewer ranks.
        num_averaged: Over how many ranks an average is taken: all of the group.
    """

    def __init__(self, host: Host, barrier: HostBarrier, num_shares: int, num_averaged: int) -> None:
        self._host = host
        self._barrier = barrier
        self._num_shares = num_shares
        self._num_averaged = num_averaged
        self._scratch: Tensor | None = None
        self._num_small = 0
        self._known_slots: dict[tuple[torch.dtype, int], tuple[Tensor, list[Tensor]]] = {}
        self._ranks = [neighbour.rank for neighbour in host.neighbours]
        self._areas = [neighbour.arena for neighbour in host.neighbours]
        self._kept = host.me.arena.allocate(STAGING_BYTES + 2 * SMALL_BYTES, torch.uint8)
        place = host.me.arena.place_of(self._kept)
        assert place is not None
        self._staging = place.start  # the first allocation: at the same place in every arena
        self.copied_bytes = 0  # into and out of staging; a bucket that lives in the arena adds nothing

    def all_reduce(self, what: Descriptor, flat: Tensor, fold: Fold, across: Across | None = None) -> None:
        """Replace `flat` on every rank by the fold of all."""
        if across is None and self.is_small(flat.numel() * flat.element_size()):
            self._all_reduce_small(what, flat, fold)
        elif across is not None and len(self._ranks) == 1:
            self._reduce_across(flat, fold, across)
        elif across is not None and self._areas[self._host.index].place_of(flat) is None:
            resident = self._resident(flat)
            self._copy_in(resident, flat)
            self.all_reduce(what, resident, fold, across)
            self._copy_out(flat, resident)
        else:
            self._all_reduce_by_shares(what, flat, fold, across)

    def _all_reduce_by_shares(
        self, what: Descriptor, flat: Tensor, fold: Fold, across: Across | None
    ) -> None:
        for pieces, mine in self._pieces(what, flat):
            self._fold_my_share(pieces, fold, across)
            self._wait(what)
            self._copy_out(mine, pieces[self._host.index])

    def is_small(self, size_bytes: int) -> bool:
        """Whether every rank folds such a message for itself (rule 5)."""
        return size_bytes <= SMALL_BYTES and size_bytes * len(self._ranks) <= 4 * SMALL_BYTES

    def _all_reduce_small(self, what: Descriptor, flat: Tensor, fold: Fold) -> None:
        num_elements = flat.numel()
        mine, others = self._slots(flat.dtype, self._num_small % 2)
        self._num_small += 1
        mine[:num_elements].copy_(flat)
        self.copied_bytes += num_elements * flat.element_size()
        self._open(what, _STAGED)
        first, *rest = [slot[:num_elements] for slot in others]
        flat.copy_(first)
        fold.all_into(flat, rest, self._num_averaged)

    def _slots(self, dtype: torch.dtype, which: int) -> tuple[Tensor, list[Tensor]]:
        """Return this rank's slot for a small input, and those of all ranks."""
        if (dtype, which) not in self._known_slots:
            place = Place(self._staging + STAGING_BYTES + SMALL_BYTES * which, SMALL_BYTES)
            slots = [arena.tensor(place, dtype) for arena in self._areas]
            self._known_slots[dtype, which] = slots[self._host.index], slots
        return self._known_slots[dtype, which]

    def _fold_my_share(self, pieces: Sequence[Tensor], fold: Fold, across: Across | None) -> None:
        """Reduce this rank's share of all ranks' pieces, and write the result into all of them."""
        me = self._host.index
        if me >= self._num_shares:
            return
        num_elements = pieces[0].numel()
        low, high = (num_elements * part // self._num_shares for part in (me, me + 1))
        step = max(CHUNK_BYTES // pieces[0].element_size(), 1)
        chunks = (
            list(zip(*(piece[low:high].split(step) for piece in pieces), strict=True)) if high > low else []
        )
        for chunk in chunks:
            mine, others = chunk[me], chunk[:me] + chunk[me + 1 :]
            fold.all_into(mine, others, 0 if across else self._num_averaged)
            if across is None:
                for other in others:
                    other.copy_(mine)
        if across is not None and chunks:
            share = pieces[me][low:high]
            self._reduce_across(share, fold, across)
            for index, piece in enumerate(pieces):
                if index != me:
                    piece[low:high].copy_(share)

    def _reduce_across(self, share: Tensor, fold: Fold, across: Across) -> None:
        across(share)
        if fold.averages:
            fold.average(share, self._num_averaged)

    def _resident(self, flat: Tensor) -> Tensor:
        """Memory in the arena for the whole of `flat` (rule 6), kept for the next one that is not longer."""
        num_bytes = flat.numel() * flat.element_size()
        if self._scratch is None or self._scratch.numel() < num_bytes:
            self._scratch = None  # its place may be part of the next one's
            self._scratch = self._areas[self._host.index].allocate(num_bytes, torch.uint8)
        return self._scratch[:num_bytes].view(flat.dtype)

    def broadcast(self, what: Descriptor, flat: Tensor, root: int) -> None:
        """Replace `flat` by that of the host's rank number `root`."""
        me = self._host.index
        for pieces, mine in self._pieces(what, flat, copy_in=me == root):
            if me != root:
                mine.copy_(pieces[root])
            self._wait(what)

    def all_gather(self, what: Descriptor, outputs: Sequence[Tensor], flat: Tensor) -> None:
        """Fill `outputs` with every rank's `flat`."""
        start = 0
        for pieces, mine in self._pieces(what, flat):
            for output, piece in zip(outputs, pieces, strict=True):
                output[start : start + piece.numel()].copy_(piece)
            start += mine.numel()
            self._wait(what)

    def reduce(self, what: Descriptor, flat: Tensor, fold: Fold, root: int) -> None:
        """Replace `flat` by the fold of all on the host's rank number `root`; elsewhere it stays."""
        me = self._host.index
        for pieces, mine in self._pieces(what, flat):
            if me == root:
                others = [piece for index, piece in enumerate(pieces) if index != root]
                fold.all_into(pieces[root], others, self._num_averaged)
                self._copy_out(mine, pieces[root])
            self._wait(what)

    def reduce_scatter(self, what: Descriptor, output: Tensor, rows: Sequence[Tensor], fold: Fold) -> None:
        """Replace `output` by the fold of every rank's row for this rank. Rows are contiguous, of one length."""
        num_elements, num_ranks = output.numel(), len(rows)
        step = max(STAGING_BYTES // (num_ranks * output.element_size()), 1)
        me = self._host.index
        self._open(what, _STAGED)
        for start in range(0, num_elements, step):
            stop = min(start + step, num_elements)
            staged = self._staged(me, output.dtype, num_ranks * (stop - start)).view(num_ranks, -1)
            for row, place in zip(rows, staged, strict=True):
                self._copy_in(place, row[start:stop])
            self._wait(what)
            mine, *others = [
                self._staged(index, output.dtype, num_ranks * (stop - start)).view(num_ranks, -1)[me]
                for index in [me, *(i for i in range(num_ranks) if i != me)]
            ]
            output[start:stop].copy_(mine)
            fold.all_into(output[start:stop], others, self._num_averaged)
            self._wait(what)

    def barrier(self, what: Descriptor) -> None:
        self._open(what, _STAGED)

    def _pieces(
        self, what: Descriptor, flat: Tensor, copy_in: bool = True
    ) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Begin a collective and go through the tensor: yields every rank's view of a piece, and our part of `flat`."""
        me = self._host.index
        place = self._areas[me].place_of(flat)
        starts = self._open(what, _STAGED if place is None else place.start)
        num_elements, itemsize = flat.numel(), flat.element_size()
        step = max(num_elements, 1) if _STAGED not in starts else STAGING_BYTES // itemsize
        for start in range(0, num_elements, step):
            mine = flat[start : start + step]
            num_bytes = mine.numel() * itemsize
            if _STAGED in starts:
                if place is None and copy_in:
                    self._copy_in(self._staged(me, flat.dtype, mine.numel()), mine)
                self._wait(what)
            yield (
                [
                    arena.tensor(
                        Place(self._staging if at == _STAGED else at + start * itemsize, num_bytes),
                        flat.dtype,
                    )
                    for arena, at in zip(self._areas, starts, strict=True)
                ],
                mine,
            )

    def _staged(self, index: int, dtype: torch.dtype, num_elements: int) -> Tensor:
        return self._areas[index].tensor(Place(self._staging, num_elements * dtype.itemsize), dtype)

    def _copy_in(self, place: Tensor, values: Tensor) -> None:
        place.copy_(values)
        self.copied_bytes += values.numel() * values.element_size()

    def _copy_out(self, values: Tensor, place: Tensor) -> None:
        if values.data_ptr() != place.data_ptr():
            values.copy_(place)
            self.copied_bytes += values.numel() * values.element_size()

    def _open(self, what: Descriptor, start: int) -> list[int]:
        """Wait for all, compare descriptors, and return where every rank's tensor lies in its arena."""
        self._barrier.announce([*what.to_integers(), start])
        self._wait(what)
        announced = self._barrier.announcements(NUM_INTEGERS + 1)
        check_agreement(what, self._host.index, self._ranks, announced)
        return [integers[NUM_INTEGERS] for integers in announced]

    def _wait(self, what: Descriptor) -> None:
        self._barrier.wait(lambda: f"in {what}")
