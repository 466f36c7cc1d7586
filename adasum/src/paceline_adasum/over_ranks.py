"""Adasum of the vectors of many ranks: over a transport (`AdasumOverRanks`), or in shared memory (`combine_shared`).

Both sum dot products in one order for all ranks, so that these have the same coefficients. One rank computes each
element of the result. So the result is bitwise equal on all ranks. 16-bit tensors are rounded once for each level.

Rules over a transport, by the schedule `vector_halving`
1. In place. What a level of the tree receives is kept in scratch memory, at the same positions as in the vector.
2. The dot products of a piece are computed while the next pieces are under way.
3. A team is the ranks that hold parts of one pair of vectors. They all-reduce their partial dot products by
   `recursive_doubling`, which gives all of them the same bits.
4. Tensors are sent in their own dtype.

Rules in shared memory, where each rank works on its share of the elements of all vectors
1. The tree is that of `local_tree.py`. A node's vector replaces that of its first rank. A share is touched by its rank
   alone, in any rank's vector.
2. Each level takes one pass for dot products and, when the ranks have added up theirs in rank order, one to combine.
   The last one hands its result to all ranks while it is in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.process_group import PIECE_BYTES, Executor, KeptMemory, SharedVectors
from paceline.schedules import cut
from paceline.transports import Transport
from paceline_adasum.operator import (
    LEFT,
    NUM_DOTS,
    RIGHT,
    Chunk,
    Norms,
    Segments,
    add_dots,
    add_peaks,
    coefficients,
    combine_into,
    scales_of,
    squared_norms,
)
from paceline_adasum.vector_halving import Level, Team, VectorHalving


class AdasumOverRanks:
    """Computes one Adasum after another, over a transport that nothing else may use meanwhile."""

    def __init__(self, transport: Transport, plan: VectorHalving, timeout_s: float) -> None:
        self.transport = transport
        self.executor = Executor(transport)
        self._plan = plan
        self._timeout_s = timeout_s
        self._scratch = KeptMemory(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
        topology = plan.topology
        self._num_neighbours = len(topology.ranks_of_host[topology.host_of_rank[transport.rank]])

    def run(self, flat: Tensor, segments: Segments) -> Norms:
        """Replace `flat`, contiguous on the CPU, shape (N,), floating, by all ranks' Adasum, bitwise equal.

        Collective; blocks. After PeerLostError `flat` is undefined and the transport cannot be used any more.
        """
        if not flat.numel():
            return Norms(0.0, 0.0)
        plan = self._plan
        call = _Call(self, flat, segments, cut(flat.numel(), plan.num_blocks), self._timeout_s)
        if plan.within.rounds:
            flat.mul_(1.0 / self._num_neighbours)  # before the sum, which could overflow in 16 bits
            self.executor.run(plan.within, flat, dist.ReduceOp.SUM, call.left_s(), operation="adasum")
        for level in plan.levels:
            call.take(level)
        self.executor.run(plan.spread, flat, None, call.left_s(), operation="adasum")
        self.executor.run(plan.tell, call.norms, None, call.left_s(), operation="adasum")
        return Norms(*call.norms.tolist())

    def scratch_like(self, flat: Tensor) -> Tensor:
        """Return uninitialized memory like `flat`, valid until the next call."""
        return self._scratch.take(flat.numel(), flat.dtype)


class _Call:
    """One Adasum under way."""

    def __init__(
        self,
        owner: AdasumOverRanks,
        flat: Tensor,
        segments: Segments,
        cuts: tuple[int, ...],
        timeout_s: float,
    ) -> None:
        self._transport = owner.transport
        self._executor = owner.executor
        self._flat = flat
        self._received = owner.scratch_like(flat)
        self._segments = segments
        self._cuts = cuts
        self._deadline = time.monotonic() + timeout_s
        self.norms = torch.zeros(2, dtype=torch.float64)
        """Squared norms of the vector that this rank holds a part of and, summed, of the inputs below its node."""

    def left_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)

    def take(self, level: Level) -> None:
        """Take one level of the tree: exchange halves, all-reduce dot products within the team, combine."""
        team = level.team_of(self._transport.rank)
        num_tensors = len(self._segments.sizes)
        sums = torch.zeros(NUM_DOTS * num_tensors + 2, dtype=torch.float64)
        dots, known_norms = sums[:-2].view(NUM_DOTS, num_tensors), sums[-2:]
        if team is None:
            self._exchange(level, [], _nothing)
            if self._flat.dtype == torch.float64:
                self._complete(level, torch.zeros(num_tensors, dtype=torch.float64), dist.ReduceOp.MAX)
            self._complete(level, sums, dist.ReduceOp.SUM)
            return
        is_left = self._transport.rank in team.left
        a, b = (self._flat, self._received) if is_left else (self._received, self._flat)
        pieces = self._pieces(level)
        scales = None
        if self._flat.dtype == torch.float64:
            self._exchange(level, pieces, _nothing)
            scales = self._common_scales(level, a, b, pieces)
            for piece in pieces:
                add_dots(dots, a, b, piece.chunks, scales)
        else:
            self._exchange(level, pieces, lambda index: add_dots(dots, a, b, pieces[index].chunks))
        self._add_known_norms(known_norms, team)
        self._complete(level, sums, dist.ReduceOp.SUM)
        both = coefficients(dots, team.num_left, team.num_right)
        mine, theirs = both if is_left else both.flip(0)
        for piece in pieces:
            combine_into(self._flat, self._received, mine, theirs, piece.chunks)
        self._note_norms(known_norms, dots, both, team, scales)

    def _pieces(self, level: Level) -> list[_Piece]:
        """Return the pieces that this rank receives, in the order in which they arrive."""
        rank = self._transport.rank
        return [
            piece
            for t in level.halving
            if t.target == rank
            for piece in _pieces_of(
                self._segments, t.source, self._cuts[t.first], self._cuts[t.last], self._flat.itemsize
            )
        ]

    def _exchange(self, level: Level, pieces: list[_Piece], react: Callable[[int], None]) -> None:
        rank = self._transport.rank
        sends = [
            (t.target, self._flat[piece.first : piece.last])
            for t in level.halving
            if t.source == rank
            for piece in _pieces_of(
                self._segments, t.target, self._cuts[t.first], self._cuts[t.last], self._flat.itemsize
            )
        ]
        receives = [(piece.peer, self._received[piece.first : piece.last]) for piece in pieces]
        if sends or receives:
            self._transport.exchange(sends, receives, self.left_s(), react)

    def _complete(self, level: Level, partial: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """All-reduce within each team. Ranks without a team send nothing, but must call it, too."""
        self._executor.run(level.completion, partial, op, self.left_s(), operation="adasum dots")

    def _common_scales(self, level: Level, a: Tensor, b: Tensor, pieces: list[_Piece]) -> Tensor:
        peaks = torch.zeros(len(self._segments.sizes), dtype=torch.float64)
        for piece in pieces:
            add_peaks(peaks, a, b, piece.chunks)
        self._complete(level, peaks, dist.ReduceOp.MAX)
        return scales_of(peaks)

    def _add_known_norms(self, known: Tensor, team: Team) -> None:
        """Write the inputs' squared norms below each child, on one rank of the child; a leaf's is a dot product."""
        rank = self._transport.rank
        if rank == team.ranks[0]:
            known[0] = self.norms[1]
        if rank == team.ranks[-1] and rank not in team.left:
            known[1] = self.norms[1]

    def _note_norms(
        self, known: Tensor, dots: Tensor, both: Tensor, team: Team, scales: Tensor | None
    ) -> None:
        scales = torch.ones(()) if scales is None else scales
        norms = dots / scales.square()
        self.norms[0] = (squared_norms(dots, both) / scales.square()).sum()
        of_inputs = zip(team.is_leaf, norms[LEFT : RIGHT + 1], known, strict=True)
        self.norms[1] = sum(float(squares.sum() if leaf else sums) for leaf, squares, sums in of_inputs)


def _nothing(index: int) -> None:
    pass


@dataclass(frozen=True)
class _Piece:
    """Elements `first` to `last` (excluded) of the vector, sent to or received from `peer` in one message."""

    peer: int
    first: int
    last: int
    chunks: list[Chunk]


@lru_cache(maxsize=1024)
def _pieces_of(segments: Segments, peer: int, first: int, last: int, itemsize: int) -> tuple[_Piece, ...]:
    """Return the pieces of a transfer. They are cached, because they are the same in every step."""
    length = PIECE_BYTES // itemsize
    starts = range(first, last, length)
    return tuple(
        _Piece(peer, start, min(start + length, last), segments.chunks(start, min(start + length, last)))
        for start in starts
    )


_CHUNKS_AT_ONCE = 2  # combined before they are handed on: what fits a core's cache


@dataclass(frozen=True)
class Pair:
    """Two nodes of the tree that are combined."""

    left: int  # the first rank below the left one; its vector becomes the result
    right: int  # of the right one
    num_left: int  # how many ranks are below the left one
    num_right: int  # below the right one


@lru_cache(maxsize=64)
def levels_of(num_ranks: int) -> tuple[tuple[Pair, ...], ...]:
    """Return the pairs of every level of the tree, from the leaves up. Those of a level are independent."""

    def visit(first: int, count: int) -> int:
        """Note the pairs below a node; returns its height."""
        if count == 1:
            return 0
        left, right = (count + 1) // 2, count // 2
        height = max(visit(first, left), visit(first + left, right))
        if height == len(levels):
            levels.append([])
        levels[height].append(Pair(first, first + left, left, right))
        return height + 1

    levels: list[list[Pair]] = []
    visit(0, num_ranks)
    return tuple(map(tuple, levels))


def combine_shared(vectors: SharedVectors, segments: Segments) -> Norms:
    """Replace the vector of each rank by the Adasum of all. Afterwards they are bitwise equal.

    There are two vectors or more, of a floating dtype.

    Collective; blocks. Mutates this rank's share of all vectors.
    """
    chunks = _chunks_of(segments, vectors.first, vectors.last)
    levels = levels_of(len(vectors.views))
    of_inputs = 0.0
    for height, pairs in enumerate(levels):
        dots, scales = _dots(vectors, segments, pairs, chunks)
        for pair, own_dots, scale in zip(pairs, dots, scales, strict=True):
            both = coefficients(own_dots, pair.num_left, pair.num_right)
            a, b = vectors.views[pair.left], vectors.views[pair.right]
            others = [v for v in vectors.views if v is not a] if height + 1 == len(levels) else []
            _combine(a, b, both, chunks, others)
            norms = own_dots / scale.square()
            of_inputs += float(norms[LEFT].sum()) if pair.num_left == 1 else 0.0
            of_inputs += float(norms[RIGHT].sum()) if pair.num_right == 1 else 0.0
            of_result = float((squared_norms(own_dots, both) / scale.square()).sum())
    return Norms(of_result, of_inputs)


def _dots(
    vectors: SharedVectors, segments: Segments, pairs: Sequence[Pair], chunks: Sequence[Chunk]
) -> tuple[Tensor, Tensor]:
    """Return the dot products of a level's pairs, shape (pairs, 3, tensors), and the scales, (pairs, tensors)."""
    num_tensors = len(segments.sizes)
    both = [(vectors.views[pair.left], vectors.views[pair.right]) for pair in pairs]
    dots = torch.zeros(len(pairs), NUM_DOTS, num_tensors, dtype=torch.float64)
    scales = torch.ones(len(pairs), num_tensors, dtype=torch.float64)
    is_wide = vectors.views[0].dtype == torch.float64
    if is_wide:
        peaks = torch.zeros_like(scales)
        for (a, b), row in zip(both, peaks, strict=True):
            add_peaks(row, a, b, chunks)
        vectors.all_reduce(peaks.view(-1), "MAX")
        scales = scales_of(peaks)
    for (a, b), row, scale in zip(both, dots, scales, strict=True):
        add_dots(row, a, b, chunks, scale if is_wide else None)
    vectors.all_reduce(dots.view(-1), "SUM")
    return dots, scales


def _combine(a: Tensor, b: Tensor, both: Tensor, chunks: Sequence[Chunk], others: Sequence[Tensor]) -> None:
    """Replace these chunks of `a` by the combination, and hand them to `others`.

    The last first: of a large bucket, these are still in the cache after the dot products.
    """
    for first in reversed(range(0, len(chunks), _CHUNKS_AT_ONCE)):
        run = chunks[first : first + _CHUNKS_AT_ONCE]
        combine_into(a, b, both[0], both[1], run)
        span = slice(run[0].first, run[-1].last)
        for other in others:
            other[span].copy_(a[span])


@lru_cache(maxsize=1024)
def _chunks_of(segments: Segments, first: int, last: int) -> list[Chunk]:
    return segments.chunks(first, last)
