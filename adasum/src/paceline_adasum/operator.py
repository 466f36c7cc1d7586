"""The Adasum operator: combines two vectors tensor by tensor, with dot products in float64.

With a, b two tensors that combine the gradients of p and q ranks (legend: d = a.b, A = |a|^2, B = |b|^2):

    Adasum(a, b) = (1 - p/(p+q) d/A) a + (1 - q/(p+q) d/B) b

It is the mean, weighted p : q, of two sequences of steps: "first a, then b" and "first b, then a". In each the second
step leaves out its projection on the first. p = q is the paper's operator.

* Orthogonal tensors: a + b, for any weights.
* Parallel tensors b = c a, c != 0: (p a + q b) / (p + q), the mean over their ranks.
* A tensor whose norm is below 2^-100 of the other's, and so a zero one, leaves the other as it is: both coefficients
  are 1. (The limit is relative, so that scaling all inputs scales the output, however small or large they are.)
* Swapping (a, p) and (b, q) changes no bit.

Rules
1. Vectors are flat slices; `Segments` says which elements belong to which tensor.
2. Products are summed in float64, of any dtype. Short runs within a large tensor of 32 bits or less are summed in
   float32, unless their squares could overflow or vanish there. Inputs in float64 are scaled per tensor before they are
   squared (`scales_of`), so norms from 1e-300 to 1e300 neither overflow nor vanish.
3. Results are computed in float32 for 16-bit tensors and rounded once.

Source: Maleki et al. 2021, "Scaling distributed training with adaptive summation", section 3; the weights are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 17
"""Of a large tensor, processed at a time: what fits a core's cache, and pays for the calls (16 bits take seven)."""

SMALL_ELEMENTS = 1 << 16
"""Tensors below are processed with their neighbours, up to as many elements."""

NEGLIGIBLE = 2.0**-200
"""Ratio of squared norms below which the smaller tensor counts as zero."""

NUM_DOTS = 3
DOT, LEFT, RIGHT = range(NUM_DOTS)
"""Rows of a tensor of dot products, shape (3, number of tensors): a.b, |a|^2, |b|^2."""

_LEAST_SQUARE, _LARGEST_SQUARE = 2.0**-70, 2.0**126
"""Between these a run's sum of squares in float32 has lost nothing that matters: squares below 2^-126 are too few."""

_RUN_ELEMENTS = 1 << 14

_Numbers = npt.NDArray[Any]

_LARGEST_EXPONENT = 1000  # 2 to its negative is a normal float64


@dataclass(frozen=True)
class Chunk:
    """Elements `first` to `last` of a flat vector: a part of one tensor, or whole small ones and their neighbours."""

    first: int
    last: int
    tensors: range
    """The tensors whose elements they are, in order."""
    lengths: Tensor | None
    """How many elements each of them has here, shape (number of tensors,); None for a single tensor."""

    @cached_property
    def runs(self) -> tuple[_Numbers, _Numbers]:
        """Return the indices of the tensors that have elements here, counted from the first, and where each begins."""
        assert self.lengths is not None
        counts = self.lengths.numpy()
        full = np.flatnonzero(counts)
        return full, (np.cumsum(counts) - counts)[full]


@dataclass(frozen=True)
class Segments:
    """The sizes of the tensors of which a flat vector consists."""

    # Elements of each tensor, in the order in which they lie in the vector; 0 is allowed.
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return sum(self.sizes)

    def chunks(self, first: int, last: int) -> list[Chunk]:
        """Cut elements `first` to `last` (excluded) so that each chunk has elements of one tensor, or is short."""
        chunks: list[Chunk] = []
        waiting: list[tuple[int, int, int]] = []  # small pieces for one chunk: tensor, first, last

        def close() -> None:
            if waiting:
                lengths = torch.tensor([stop - start for _, start, stop in waiting])
                whose = range(waiting[0][0], waiting[-1][0] + 1)
                chunks.append(
                    Chunk(waiting[0][1], waiting[-1][2], whose, lengths if len(waiting) > 1 else None)
                )
                waiting.clear()

        end = 0
        for tensor, size in enumerate(self.sizes):
            start, end = end, end + size
            piece = max(start, first), min(end, last)
            length = piece[1] - piece[0]
            if length <= 0:
                if waiting and start < last:
                    waiting.append((tensor, start, start))  # an empty tensor between small ones
                continue
            if waiting and piece[1] - waiting[0][1] > SMALL_ELEMENTS:
                close()
            if length < SMALL_ELEMENTS:
                waiting.append((tensor, *piece))
                continue
            close()
            for begin in range(piece[0], piece[1], CHUNK_ELEMENTS):
                stop = min(begin + CHUNK_ELEMENTS, piece[1])
                chunks.append(Chunk(begin, stop, range(tensor, tensor + 1), None))
        close()
        return chunks


@dataclass(frozen=True)
class Norms:
    """Squared norms of the result and, summed, of the inputs; by-products of the dot products."""

    of_result: float
    of_inputs: float


def new_dots(num_tensors: int, device: torch.device) -> Tensor:
    """Return zeros for `add_dots`, shape (3, num_tensors), float64."""
    return torch.zeros(NUM_DOTS, num_tensors, dtype=torch.float64, device=device)


def add_dots(
    dots: Tensor, a: Tensor, b: Tensor, chunks: Sequence[Chunk], scales: Tensor | None = None
) -> None:
    """Add the dot products of these chunks of `a` and `b` to `dots`.

    `dots` has shape (3, tensors), float64, `a` and `b` (N,). `scales` are factors of both, shape (tensors,), for
    float64 vectors. Mutates `dots`.
    """
    if a.dtype != torch.float64 and a.device.type == "cpu":
        chunks = _add_in_single(dots.numpy(), a, b, chunks)
    scratch = _scratch(3, chunks, torch.float64, a.device)
    for chunk in chunks:
        x, y, product = scratch[:, : chunk.last - chunk.first]
        x.copy_(a[chunk.first : chunk.last])
        y.copy_(b[chunk.first : chunk.last])
        if scales is not None:
            scale = _spread(scales, chunk)
            x.mul_(scale)
            y.mul_(scale)
        if chunk.lengths is None:
            dots[:, chunk.tensors.start] += torch.stack([torch.dot(x, y), torch.dot(x, x), torch.dot(y, y)])
            continue
        torch.mul(x, y, out=product)
        # DOT, LEFT, RIGHT
        sums = [_sums(products, chunk) for products in (product, x.square_(), y.square_())]
        dots[:, chunk.tensors.start : chunk.tensors.stop] += torch.stack(sums)


def _add_in_single(dots: _Numbers, a: Tensor, b: Tensor, chunks: Sequence[Chunk]) -> list[Chunk]:
    """Add the dot products of those chunks whose numbers need not be widened first; returns the others.

    To widen takes three times as long. Within runs as short as these, which numpy's library adds up in several parts,
    a sum is off by less than 1e-6 of |a| |b|.
    """
    left: list[Chunk] = []
    rows = None if a.dtype == torch.float32 else _scratch(2, chunks, torch.float32, a.device)
    with np.errstate(all="ignore"):
        for chunk in chunks:
            if chunk.lengths is not None:
                left.append(chunk)
                continue
            parts = a[chunk.first : chunk.last], b[chunk.first : chunk.last]
            if rows is not None:
                parts = rows[0, : len(parts[0])].copy_(parts[0]), rows[1, : len(parts[1])].copy_(parts[1])
            found = _dots_of_runs(parts[0].numpy(), parts[1].numpy())
            if found is None:
                left.append(chunk)
            else:
                dots[:, chunk.tensors.start] += found
    return left


def _dots_of_runs(a: _Numbers, b: _Numbers) -> tuple[float, float, float] | None:
    """Return a.b, |a|^2 and |b|^2 of float32 vectors, or None if a square may have over- or underflowed."""
    dot = of_a = of_b = 0.0
    for first in range(0, len(a), _RUN_ELEMENTS):
        x, y = a[first : first + _RUN_ELEMENTS], b[first : first + _RUN_ELEMENTS]
        squares = float(x.dot(x)), float(y.dot(y))
        if not (min(squares) > _LEAST_SQUARE and max(squares) < _LARGEST_SQUARE):
            return None
        dot, of_a, of_b = dot + float(x.dot(y)), of_a + squares[0], of_b + squares[1]
    return dot, of_a, of_b


def add_peaks(peaks: Tensor, a: Tensor, b: Tensor, chunks: Sequence[Chunk]) -> None:
    """Raise `peaks`, shape (number of tensors,), to the largest magnitudes in these chunks of `a` and `b`."""
    for chunk in chunks:
        largest = torch.maximum(a[chunk.first : chunk.last].abs(), b[chunk.first : chunk.last].abs())
        mine = peaks[chunk.tensors.start : chunk.tensors.stop]
        if chunk.lengths is None:
            torch.maximum(mine, largest.max(), out=mine)
        else:
            lengths = chunk.lengths.to(largest.device)
            torch.maximum(mine, torch.segment_reduce(largest, "max", lengths=lengths, initial=0.0), out=mine)


def scales_of(peaks: Tensor) -> Tensor:
    """Return powers of two that bring these magnitudes near 1, in the shape of `peaks`."""
    exponents = torch.frexp(peaks).exponent.clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    return torch.ldexp(torch.ones_like(peaks), -exponents)


def coefficients(dots: Tensor, num_left: int, num_right: int) -> Tensor:
    """Return the coefficients of a and b for each tensor, shape (2, number of tensors), float64.

    `dots` are complete, shape (3, tensors); a combines the gradients of `num_left` ranks, b those of `num_right`.
    """
    dot, left, right = dots
    share = num_left / (num_left + num_right)
    of_left = 1.0 - torch.where(left <= NEGLIGIBLE * right, 0.0, share * dot / left)
    of_right = 1.0 - torch.where(right <= NEGLIGIBLE * left, 0.0, (1.0 - share) * dot / right)
    return torch.stack([of_left, of_right])


def combine_into(
    own: Tensor, other: Tensor, own_coefficients: Tensor, other_coefficients: Tensor, chunks: Sequence[Chunk]
) -> None:
    """Replace these chunks of `own` by own_coefficients * own + other_coefficients * other.

    One coefficient for each tensor. Mutates `own`, shape (N,); `other` is undefined afterwards.
    """
    wide = torch.float64 if own.dtype == torch.float64 else torch.float32
    of_own, of_other = own_coefficients.to(wide), other_coefficients.to(wide)
    numbers = [of_own.tolist(), of_other.tolist()]  # quicker than tensors of one element
    scratch = _scratch(2, chunks, wide, own.device) if own.dtype != wide else None
    for chunk in chunks:
        target = own[chunk.first : chunk.last]
        x, y = target, other[chunk.first : chunk.last]
        if scratch is not None:
            x, y = (row.copy_(values) for row, values in zip(scratch[:, : len(x)], (x, y), strict=True))
        # Two rounded products and a sum: with a fused multiply-add, swapping a and b would change bits.
        if chunk.lengths is None:
            for_x, for_y = (of[chunk.tensors.start] for of in numbers)
            x.mul_(for_x).add_(y.mul_(for_y))
        else:
            x.mul_(_spread(of_own, chunk)).add_(y.mul_(_spread(of_other, chunk)))
        if scratch is not None:
            target.copy_(x)


def squared_norms(dots: Tensor, coefficients: Tensor) -> Tensor:
    """Return the squared norm of each combined tensor, shape (tensors,), from dot products and coefficients."""
    of_left, of_right = coefficients
    dot, left, right = dots
    norms: Tensor = of_left * of_left * left + of_right * of_right * right + 2.0 * of_left * of_right * dot
    return norms


def _sums(values: Tensor, chunk: Chunk) -> Tensor:
    assert chunk.lengths is not None
    if values.device.type != "cpu":
        return torch.segment_reduce(values, "sum", lengths=chunk.lengths.to(values.device))
    # A quarter of the time of segment_reduce, but without empty segments.
    full, firsts = chunk.runs
    sums = np.zeros(len(chunk.lengths))
    sums[full] = np.add.reduceat(values.numpy(), firsts)
    return torch.from_numpy(sums)


def _scratch(num_rows: int, chunks: Sequence[Chunk], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return scratch rows as long as the longest chunk. All chunks share them: fresh memory for each would be slow."""
    longest = max((chunk.last - chunk.first for chunk in chunks), default=0)
    return torch.empty(num_rows, longest, dtype=dtype, device=device)


def _spread(values: Tensor, chunk: Chunk) -> Tensor:
    """Return for each element of the chunk the value of its tensor; one value if there is one tensor."""
    mine = values[chunk.tensors.start : chunk.tensors.stop]
    if chunk.lengths is None:
        return mine
    if mine.device.type == "cpu":  # in a fifth of the time
        return torch.from_numpy(np.repeat(mine.numpy(), chunk.lengths.numpy()))
    size = chunk.last - chunk.first
    return torch.repeat_interleave(mine, chunk.lengths.to(mine.device), output_size=size)
