"""Adasum of vectors that all ranks of a host see at once: each rank works on its share of the elements of all of them.

Rules
1. The tree is that of `local_tree.py`. A node's vector replaces that of its first rank; nobody but a share's rank
   touches the share, in any rank's vector.
2. Each level takes one pass for dot products and, when the ranks have added up theirs, one to combine. The last one
   hands its result to all ranks while it is in the cache.
3. Dot products are added up in the order of the ranks, so all ranks have the same coefficients; every element of the
   result is computed by one rank. So the result is bitwise equal on all ranks.
4. 16-bit tensors are rounded once for each level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from paceline.process_group import SharedVectors
from paceline.reductions.adasum.operator import (
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
    """The pairs of every level of the tree, from the leaves up; those of a level are independent."""

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
    """Replace every rank's vector, of at least two floating ones, by the Adasum of all: bitwise equal afterwards.

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
    """The complete dot products of a level's pairs, shape (pairs, 3, tensors), and the scales, (pairs, tensors)."""
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
    """Cached, as they are the same in every step."""
    return segments.chunks(first, last)
