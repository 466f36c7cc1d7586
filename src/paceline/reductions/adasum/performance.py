"""Performs Adasum over a transport, by the schedule `vector_halving`.

Rules
1. In place. What a level receives is kept in scratch memory, at the same positions as in the message.
2. Dot products of a piece are taken while the next pieces are under way.
3. A team sums its partial dot products in an order that gives all its members the same bits
   (`recursive_doubling`), and every element of the result is computed by one rank and copied to all others. So the
   result is bitwise equal on all ranks.
4. Tensors on the wire have their own dtype: 16-bit tensors are rounded once a level.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.process_group.executor import PIECE_BYTES, Executor
from paceline.reductions.adasum.operator import (
    LEFT,
    NUM_DOTS,
    RIGHT,
    Chunk,
    Segments,
    add_dots,
    add_peaks,
    coefficients,
    combine_into,
    scales_of,
    squared_norms,
)
from paceline.schedules.schedule import cut
from paceline.schedules.vector_halving import Level, Team, VectorHalving
from paceline.transports import Transport


@dataclass(frozen=True)
class Norms:
    """What the dot products reveal besides: squared norms, of the result and, summed, of the inputs."""

    of_result: float
    of_inputs: float


class Performance:
    """Performs one Adasum after another.

    Args:
        transport: Over all ranks of `plan`; nothing else may use it meanwhile.
        plan: Who exchanges what; the same on every rank.
        timeout_s: For one Adasum.
    """

    def __init__(self, transport: Transport, plan: VectorHalving, timeout_s: float) -> None:
        self.transport = transport
        self.executor = Executor(transport)
        self._plan = plan
        self._timeout_s = timeout_s
        self._scratch = torch.empty(0)
        topology = plan.topology
        self._num_neighbours = len(topology.ranks_of_host[topology.host_of_rank[transport.rank]])

    def run(self, flat: Tensor, segments: Segments) -> Norms:
        """Replace `flat` by the Adasum of all ranks' vectors.

        Args:
            flat: On the CPU, contiguous, shape (N,), floating; N and dtype as on every rank.
            segments: Which elements belong to which tensor; the same on every rank.

        Contract:
            Collective: every rank, same order.  Blocks: yes.  Mutates: `flat`; after an error it is undefined and the
            transport cannot be used any more.
            Afterwards: bitwise equal on all ranks.

        Raises:
            PeerLostError: a peer died or did not do its part in time.
        """
        if not flat.numel():
            return Norms(0.0, 0.0)
        plan = self._plan
        call = _Call(self, flat, segments, cut(flat.numel(), plan.num_blocks), self._timeout_s)
        if plan.within.rounds:
            flat.mul_(
                1.0 / self._num_neighbours
            )  # before the sum, so that 16-bit numbers do not overflow in it
            self.executor.run(plan.within, flat, dist.ReduceOp.SUM, call.left_s(), operation="adasum")
        for level in plan.levels:
            call.take(level)
        self.executor.run(plan.spread, flat, None, call.left_s(), operation="adasum")
        self.executor.run(plan.tell, call.norms, None, call.left_s(), operation="adasum")
        return Norms(*call.norms.tolist())

    def scratch_like(self, flat: Tensor) -> Tensor:
        """Uninitialized, as long as `flat`; the same memory again and again."""
        if self._scratch.dtype != flat.dtype or self._scratch.numel() < flat.numel():
            self._scratch = torch.empty_like(flat)
        return self._scratch[: flat.numel()]


class _Call:
    """One Adasum under way."""

    def __init__(
        self,
        performance: Performance,
        flat: Tensor,
        segments: Segments,
        cuts: tuple[int, ...],
        timeout_s: float,
    ) -> None:
        self._transport = performance.transport
        self._executor = performance.executor
        self._flat = flat
        self._received = performance.scratch_like(flat)
        self._segments = segments
        self._cuts = cuts
        self._deadline = time.monotonic() + timeout_s
        self.norms = torch.zeros(2, dtype=torch.float64)
        """Squared norms of the vector that this rank has a part of, and, summed, of the inputs behind it."""

    def left_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)

    def take(self, level: Level) -> None:
        """One level of the tree: exchange, complete the dot products, fold."""
        team = level.team_of(self._transport.rank)
        num_tensors = len(self._segments.sizes)
        words = torch.zeros(NUM_DOTS * num_tensors + 2, dtype=torch.float64)
        dots = words[:-2].view(NUM_DOTS, num_tensors)
        if team is None:
            self._exchange(level, [], _nothing)
            if self._flat.dtype == torch.float64:
                self._complete(level, torch.zeros(num_tensors, dtype=torch.float64), dist.ReduceOp.MAX)
            self._complete(level, words, dist.ReduceOp.SUM)
            return
        is_left = self._transport.rank in team.left
        a, b = (self._flat, self._received) if is_left else (self._received, self._flat)
        pieces = self._pieces(level)
        scales = None
        if self._flat.dtype == torch.float64:
            self._exchange(level, pieces, _nothing)
            scales = self._agree_on_scales(level, a, b, pieces)
            for piece in pieces:
                add_dots(dots, a, b, piece.chunks, scales)
        else:
            self._exchange(level, pieces, lambda index: add_dots(dots, a, b, pieces[index].chunks))
        self._add_known_norms(words[-2:], team)
        self._complete(level, words, dist.ReduceOp.SUM)
        both = coefficients(dots, team.num_left, team.num_right)
        mine, theirs = both if is_left else both.flip(0)
        for piece in pieces:
            combine_into(self._flat, self._received, mine, theirs, piece.chunks)
        self._note_norms(words[-2:], dots, both, team, scales)

    def _pieces(self, level: Level) -> list[_Piece]:
        """What this rank receives, as it arrives."""
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

    def _complete(self, level: Level, words: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Sum, or maximize, over the team; ranks without a team only keep count."""
        self._executor.run(level.completion, words, op, self.left_s(), operation="adasum dots")

    def _agree_on_scales(self, level: Level, a: Tensor, b: Tensor, pieces: list[_Piece]) -> Tensor:
        peaks = torch.zeros(len(self._segments.sizes), dtype=torch.float64)
        for piece in pieces:
            add_peaks(peaks, a, b, piece.chunks)
        self._complete(level, peaks, dist.ReduceOp.MAX)
        return scales_of(peaks)

    def _add_known_norms(self, words: Tensor, team: Team) -> None:
        """The squared norms of the inputs behind each side, from one rank of the side; a leaf's is a dot product."""
        rank = self._transport.rank
        if rank == team.ranks[0]:
            words[0] = self.norms[1]
        if rank == team.ranks[-1] and rank not in team.left:
            words[1] = self.norms[1]

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
    """Elements `first` to `last` (excluded) of the message, on their way to or from `peer`."""

    peer: int
    first: int
    last: int
    chunks: list[Chunk]


@lru_cache(maxsize=1024)
def _pieces_of(segments: Segments, peer: int, first: int, last: int, itemsize: int) -> tuple[_Piece, ...]:
    """A transfer, cut into pieces; the same for every step, so it is worked out once."""
    length = PIECE_BYTES // itemsize
    starts = range(first, last, length)
    return tuple(
        _Piece(peer, start, min(start + length, last), segments.chunks(start, min(start + length, last)))
        for start in starts
    )
