"""Collectives between the ranks of one host, through memory that they share.

Rules
1. Every collective begins with a barrier at which the ranks compare what they are about to do.
2. A tensor that lies in its owner's arena is worked on where it is, any other in pieces that are copied (`staging.py`).
3. In a reduction, rank i of k folds the i-th of k shares. It reads that share from all ranks, in their order, and
   writes the result to all of them. Each element is computed once, so all ranks end with the same bits.
4. A small all-reduce, broadcast or all-gather is staged whole, and takes a single barrier. Every rank folds an
   all-reduce for itself, in the same order.
5. What goes on to other hosts goes in one piece, as they may stage where this one does not. So it is copied into the
   arena whole.

Cost:
    All-reduce of N bytes on k ranks: each reads N and writes N, for any k. It copies 2 (k-1)/k N more if its tensor
    is not in the arena.

Source:
    The share-wise scheme is the first and last phase of Goyal et al. 2017, section 4, over memory instead of NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from paceline.comm.collectives import shares_memory
from paceline.errors import CollectiveMismatchError, ProtocolError
from paceline.process_group.descriptor import Descriptor, described
from paceline.process_group.folds import Fold, fold_of
from paceline.process_group.staging import Span, Staging, spans_of
from paceline.transports.shared_memory import Host, HostBarrier


@dataclass(frozen=True)
class SharedVectors:
    """The vectors that a rank sees during `ProcessGroup.on_all_vectors`."""

    views: tuple[Tensor, ...]  # every rank's vector, in the order of the ranks; shape (N,) each
    first: int  # this rank alone works on elements `first` to `last` (excluded), of all vectors: it may change them
    last: int  # likewise
    # Replaces a small CPU tensor by the reduction of all ranks' by an operation (of `torch.distributed.ReduceOp`, by
    # name), with the same bits on all. Collective; blocks.
    all_reduce: Callable[[Tensor, str], None]


OnAllVectors = Callable[[str, Tensor, Callable[[SharedVectors], None]], dist.Work]


def shared_vectors_of(group: dist.ProcessGroup) -> OnAllVectors | None:
    """Return the group's `on_all_vectors`; None where its ranks do not share memory. The same on every rank."""
    ours: Any = group
    return ours.on_all_vectors if shares_memory(group) else None


CHUNK_BYTES = 512 * 1024  # folded and handed on while it is in the cache
SMALL_BYTES = 64 * 1024

Across = Callable[[Tensor], None]  # reduces one share over the hosts, in place


class HostCollectives:
    """The collectives of the ranks of one host. Every method is collective over them and blocks.

    The first `num_shares` of them fold: as many as the smallest host has. Averages are over `num_averaged` ranks: all
    of the group.
    """

    def __init__(self, host: Host, barrier: HostBarrier, num_shares: int, num_averaged: int) -> None:
        self._staging = Staging(host, barrier)
        self._me = host.index
        self._ranks = [neighbour.rank for neighbour in host.neighbours]
        self._num_shares = num_shares
        self._num_averaged = num_averaged
        # A mean that widens is divided within a host, over the hosts, and by the rest if hosts are of unequal size.
        self._divisor_here = max(map(len, host.hosts))
        self._divisor_left = num_averaged / (self._divisor_here * len(host.hosts))

    @property
    def copied_bytes(self) -> int:
        """Return the bytes copied into and out of staging so far."""
        return self._staging.copied_bytes

    def all_reduce(self, what: Descriptor, flat: Tensor, fold: Fold, across: Across | None = None) -> None:
        """Replace `flat` on every rank by the fold of all."""
        if across is None and self.is_small(flat.nbytes):
            self._all_reduce_small(what, flat, fold)
        elif across is not None and len(self._ranks) == 1:
            if fold.averages and fold.widens and self._divisor_here > 1:
                fold.average(flat, self._divisor_here)
            self._reduce_across(flat, fold, across)
        elif across is not None and not self._staging.is_resident(flat):
            with self._staging.resident(flat) as resident:
                self._all_reduce_by_shares(what, resident, fold, across)
        else:
            self._all_reduce_by_shares(what, flat, fold, across)

    def is_small(self, size_bytes: int) -> bool:
        """Return whether such a message of each rank is staged whole (rule 4)."""
        return size_bytes <= SMALL_BYTES and size_bytes * len(self._ranks) <= 4 * SMALL_BYTES

    def _all_reduce_small(self, what: Descriptor, flat: Tensor, fold: Fold) -> None:
        slots = self._staging.gather(what, flat)
        if len(slots) != 2:
            fold.all_of(slots, flat, self._num_averaged)
            return
        # Of two ranks each folds into the other's slot, which no other rank reads: it takes the memory out of the other
        # core's cache. Memory that both caches have had takes its owner four times as long to write, or more.
        target = slots[1 - self._me]
        fold.all_of([target, flat] if self._me else [flat, target], target, self._num_averaged)
        flat.copy_(target)

    def _all_reduce_by_shares(
        self, what: Descriptor, flat: Tensor, fold: Fold, across: Across | None
    ) -> None:
        me = self._me

        def others_of(values: Tensor) -> tuple[Tensor, ...]:
            low, high = self._share(values.numel())
            return values[:low], values[high:]

        def enter(piece: Tensor, slot: Tensor) -> int:
            return _copy(others_of(slot), others_of(piece))

        def work(span: Span, views: Sequence[Tensor]) -> None:
            low, high = self._share(span[1] - span[0])
            shares = [view[low:high] for view in views]
            shares[me] = flat[span[0] + low : span[0] + high]
            self._fold_share(shares, fold, across)

        def leave(piece: Tensor, slot: Tensor) -> int:
            return _copy(others_of(piece), others_of(slot))

        self._staging.stream(what, flat, work, enter, leave)

    def _share(self, num_elements: int) -> Span:
        """Return the range of elements that this rank folds; an empty one at the end if it folds none."""
        first, last = (min(self._me + more, self._num_shares) for more in (0, 1))
        return num_elements * first // self._num_shares, num_elements * last // self._num_shares

    def _fold_share(self, shares: Sequence[Tensor], fold: Fold, across: Across | None) -> None:
        """Reduce this rank's share, and write it everywhere; in rank order, so that cuts do not change bits."""
        if not shares[0].numel():
            return
        step = max(CHUNK_BYTES // shares[0].element_size(), 1)
        # 16 bits may hold the mean and not the sum.
        divisor = self._num_averaged if across is None else self._divisor_here if fold.widens else 0
        for first, *others in zip(*(share.split(step) for share in shares), strict=True):
            fold.all_of([first, *others], first, divisor)
            if across is None:
                for other in others:
                    other.copy_(first)
        if across is not None:
            self._reduce_across(shares[0], fold, across)
            for share in shares[1:]:
                share.copy_(shares[0])

    def _reduce_across(self, share: Tensor, fold: Fold, across: Across) -> None:
        if not share.numel():
            return  # as on hosts with several ranks, which would not answer
        across(share)
        if fold.averages:
            fold.average(share, self._divisor_left if fold.widens else self._num_averaged)

    def broadcast(self, what: Descriptor, flat: Tensor, root: int) -> None:
        """Replace `flat` by that of the host's rank number `root`."""
        if self.is_small(flat.nbytes):
            slots = self._staging.gather(what, flat, enters=self._me == root)
            if self._me != root:
                flat.copy_(slots[root])
            return

        def work(span: Span, views: Sequence[Tensor]) -> None:
            if self._me != root:
                flat[slice(*span)].copy_(views[root])

        self._staging.stream(what, flat, work, _enter_whole if self._me == root else None)

    def all_gather(self, what: Descriptor, outputs: Sequence[Tensor], flat: Tensor) -> None:
        """Fill `outputs` with every rank's `flat`."""
        if self.is_small(flat.nbytes):
            for output, slot in zip(outputs, self._staging.gather(what, flat), strict=True):
                output.copy_(slot)
            return

        def work(span: Span, views: Sequence[Tensor]) -> None:
            for index, (output, view) in enumerate(zip(outputs, views, strict=True)):
                output[slice(*span)].copy_(flat[slice(*span)] if index == self._me else view)

        self._staging.stream(what, flat, work, _enter_whole)

    def all_gather_pieces(self, rows: Sequence[Sequence[Tensor]]) -> None:
        """Fill the other ranks' rows with what they have. A row is a list of pieces, 1-D, which are staged together."""
        me, dtype = self._me, next(piece.dtype for row in rows for piece in row)
        length = max(sum(map(Tensor.numel, row)) for row in rows)
        spans = spans_of(length, dtype.itemsize)

        def enter(number: int, turn: int) -> int:
            slot = self._staging.slots(turn, dtype, spans[0][1])[me]
            pieces = _within(rows[me], spans[number])
            return _copy(_cut_like(pieces, slot), pieces)

        def work(number: int, turn: int) -> None:
            for index, slot in enumerate(self._staging.slots(turn, dtype, spans[0][1])):
                if index != me:
                    pieces = _within(rows[index], spans[number])
                    _copy(pieces, _cut_like(pieces, slot))

        self._staging.exchange(described("all-gather", dtype, length), (len(spans),), enter, work)

    def reduce(self, what: Descriptor, flat: Tensor, fold: Fold, root: int) -> None:
        """Replace `flat` by the fold of all on the host's rank number `root`; elsewhere it stays."""

        def work(span: Span, views: Sequence[Tensor]) -> None:
            if self._me == root:
                others = [view for index, view in enumerate(views) if index != root]
                own = flat[slice(*span)]
                fold.all_of([own, *others], own, self._num_averaged)

        self._staging.stream(what, flat, work, None if self._me == root else _enter_whole)

    def reduce_scatter(self, what: Descriptor, output: Tensor, rows: Sequence[Tensor], fold: Fold) -> None:
        """Replace `output` by the fold of every rank's row for this rank. Rows are contiguous, of one length."""
        me, num_ranks, dtype = self._me, len(rows), output.dtype
        spans = spans_of(output.numel(), dtype.itemsize * num_ranks)
        foreign = [index for index in range(num_ranks) if index != me]

        def enter(number: int, turn: int) -> int:
            first, last = spans[number]
            places = self._staging.slots(turn, dtype, num_ranks * (last - first))[me].view(num_ranks, -1)
            sources = [rows[index][first:last] for index in foreign]
            return _copy([places[index] for index in foreign], sources)

        def work(number: int, turn: int) -> None:
            first, last = spans[number]
            slots = self._staging.slots(turn, dtype, num_ranks * (last - first))
            others = [slots[index].view(num_ranks, -1)[me] for index in foreign]
            fold.all_of([rows[me][first:last], *others], output[first:last], self._num_averaged)

        self._staging.exchange(what, (len(spans),), enter, work)

    def all_to_all(self, what: Descriptor, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Send row r of `inputs` to rank r, and fill row r of `outputs` from it. Contiguous, 1-D, one dtype.

        Raises CollectiveMismatchError if a rank has a row of another length for this one.
        """
        me, width, staging = self._me, inputs[0].dtype.itemsize, self._staging
        lengths, expected = list(map(Tensor.numel, inputs)), list(map(Tensor.numel, outputs))
        step = staging.lane_bytes // width
        num_pieces = max(-(-max(*lengths, *expected) // step), 1)
        for_others, from_others = [*inputs[:me], *inputs[me + 1 :]], [*outputs[:me], *outputs[me + 1 :]]

        def enter(number: int, turn: int) -> int:
            parts = for_others if num_pieces == 1 and not number else _parts(for_others, number, step)
            return _copy(staging.lanes(turn, parts, are_mine=True), parts)

        def work(number: int, turn: int) -> None:
            parts = from_others if num_pieces == 1 and not number else _parts(from_others, number, step)
            _copy(parts, staging.lanes(turn, parts, are_mine=False))

        def check(announced: Sequence[Sequence[int]]) -> None:
            for index, theirs in enumerate(announced):
                if theirs[1 + me] != expected[index]:
                    raise self._unequal(what, index, theirs[1 + me] * width, expected[index] * width)
            outputs[me].copy_(inputs[me])

        staging.exchange(what, (num_pieces, *lengths), enter, work, check)

    def _unequal(self, what: Descriptor, index: int, sent: int, expected: int) -> CollectiveMismatchError:
        return CollectiveMismatchError(
            f"rank {self._ranks[self._me]} launched {what} and expects {expected} bytes of rank {self._ranks[index]}, "
            f"which has {sent} for it. A rank's message to another is as long as the other's place for it. Compare "
            "the input sizes of the one with the output sizes of the other. The output is undefined, and the group "
            "can no longer be used."
        )

    def on_all_vectors(self, kind: str, flat: Tensor, perform: Callable[[SharedVectors], None]) -> None:
        """Call `perform` while the whole vectors of all ranks are in memory that it can read (rule 5)."""
        what = described(kind, flat.dtype, flat.numel())
        if not flat.numel():
            self._staging.open(what)
            return
        if not self._staging.is_resident(flat):
            with self._staging.resident(flat) as resident:
                self.on_all_vectors(kind, resident, perform)
            return

        def all_reduce(small: Tensor, name: str) -> None:
            self.all_reduce(what, small, fold_of(name, small.dtype))

        views = self._staging.all_of(what, flat)
        perform(SharedVectors(tuple(views), *self._share(flat.numel()), all_reduce))
        self._staging.wait(what)

    def barrier(self, what: Descriptor) -> None:
        """Wait for all ranks of the host, and compare which collective each is in."""
        self._staging.open(what)


class HostVectors:
    """The vectors of all ranks of one host, for ranks without a group that shares memory."""

    def __init__(self, host: Host, timeout_s: float) -> None:
        self._rank = host.me.rank
        self._barrier = HostBarrier(host, timeout_s)
        self._here = HostCollectives(host, self._barrier, host.num_ranks, host.num_ranks)

    def on_all(self, kind: str, flat: Tensor, perform: Callable[[SharedVectors], None]) -> None:
        """Perform `on_all_vectors` on the calling thread. Collective; blocks. After an error the barrier is broken."""
        if self._barrier.is_broken:
            raise ProtocolError(
                f"rank {self._rank} can't communicate any more, because an earlier {kind} failed. Make a new wrapper "
                "or optimizer, over a new process group."
            )
        try:
            self._here.on_all_vectors(kind, flat, perform)
        except BaseException:
            if not self._barrier.is_broken:
                self._barrier.give_up(self._rank)
            raise


def _enter_whole(piece: Tensor, slot: Tensor) -> int:
    slot.copy_(piece)
    return piece.nbytes


def _within(pieces: Sequence[Tensor], span: Span) -> list[Tensor]:
    """Return the parts of these pieces, laid end to end, that lie in a span."""
    found, start = [], 0
    for piece in pieces:
        first, last = max(span[0] - start, 0), min(span[1] - start, piece.numel())
        if first < last:
            found.append(piece[first:last])
        start += piece.numel()
    return found


def _cut_like(pieces: Sequence[Tensor], slot: Tensor) -> Sequence[Tensor]:
    """Return the places of these pieces in a slot."""
    lengths = [piece.numel() for piece in pieces]
    return slot[: sum(lengths)].split(lengths) if lengths else ()


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> int:
    num_bytes = 0
    for target, source in zip(targets, sources, strict=True):
        if size_bytes := source.nbytes:
            target.copy_(source)
            num_bytes += size_bytes
    return num_bytes


def _parts(rows: Sequence[Tensor], number: int, length: int) -> list[Tensor]:
    """Return part `number` of each row: `length` elements, or fewer at the end."""
    return [row[number * length : (number + 1) * length] for row in rows]
