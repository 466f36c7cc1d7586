"""Sparsification: sends the largest (`TopK`) or random (`RandomK`) elements unchanged, and leaves out the others."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.compression.compressor import Compressor, Layout, Seeds, from_host
from paceline.errors import ConfigurationError
from paceline.given import number

SAMPLED_FROM = 1 << 15  # elements from which `TopK` estimates a threshold; smaller gradients are sorted
STRIDE = 61  # of the sample; a prime, so that it visits every column of a matrix
_DRAW_BITS = 31
_SEED_SPREAD = 0x9E3779B97F4A7C15  # odd, so that different positions give different seeds


class Sparse(Compressor):
    """A compressor that sends a fraction of every parameter's elements, at least one. Final classes choose which."""

    needs_feedback = True
    is_sparse = True

    def __init__(self, ratio: float = 0.01) -> None:
        if not 0 < number(ratio) <= 1:
            raise ConfigurationError(
                f"{type(self).__name__}: ratio={ratio!r} must be more than 0 and at most 1: the share of elements "
                "that is sent in each step. 0.01 is usual."
            )
        self.ratio = float(ratio)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(ratio={self.ratio})"

    def num_sent(self, layout: Layout) -> tuple[int, ...]:
        """Return how many elements of each gradient are sent."""
        return tuple(min(size, math.ceil(self.ratio * size)) for size in layout.sizes)


class TopK(Sparse):
    """The fraction `ratio` of each parameter's elements that is largest in magnitude, exactly.

    Cost:
        A value and a 4-byte index for each element sent: 2 x ratio of float32. Gathered, so each of P ranks sends P-1
        times that.

    Source:
        Lin et al., "Deep Gradient Compression", ICLR 2018, section 3. Their threshold from a sample finds
        candidates here, from which exactly the largest are taken.
    """

    additive = False

    def payload_bytes(self, layout: Layout) -> int:
        return sum(self.num_sent(layout)) * (layout.dtype.itemsize + 4)

    def compress(self, flat: Tensor, layout: Layout, seeds: Seeds) -> Tensor:
        payload = torch.empty(self.payload_bytes(layout), dtype=torch.uint8, device=flat.device)
        values, indices = self._parts(payload, layout)
        counts, start = self.num_sent(layout), 0
        outputs = zip(values.split(counts), indices.split(counts), strict=True)
        for piece, (value, index), count in zip(flat.split(list(layout.sizes)), outputs, counts, strict=True):
            chosen = _largest(piece.abs(), count)
            value.copy_(piece[chosen])
            index.copy_(chosen).add_(start)
            start += piece.numel()
        return payload

    def add_decoded(
        self, target: Tensor, payload: Tensor, layout: Layout, common: int, sign: int = 1
    ) -> None:
        values, indices = self._parts(payload, layout)
        target.index_add_(0, indices, values.to(target.dtype), alpha=sign)

    def _parts(self, payload: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Return a payload's values and their indices in the bucket, shape (k,) each."""
        num_sent, width = sum(self.num_sent(layout)), layout.dtype.itemsize
        if width < 4:  # the wider of the two lies first, so that both are aligned
            return payload[4 * num_sent :].view(layout.dtype), payload[: 4 * num_sent].view(torch.int32)
        return payload[: width * num_sent].view(layout.dtype), payload[width * num_sent :].view(torch.int32)


def _largest(magnitudes: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest elements, in no particular order. NaN counts as the largest.

    A strided sample gives a threshold that somewhat more than `count` elements should exceed; only these candidates are
    sorted. If the sample was misleading, they are too few, and the whole tensor is sorted.
    """
    size = magnitudes.numel()
    # Where candidates lie on an accelerator the host would have to wait for their number.
    if magnitudes.is_cpu and size >= SAMPLED_FROM and 8 * count < size:
        sample = magnitudes[::STRIDE]
        expected = count * sample.numel() / size
        above = math.ceil(expected + 4 * math.sqrt(expected) + 2)
        threshold = sample.topk(above, sorted=True).values[-1]
        candidates = (magnitudes <= threshold).logical_not_().nonzero().view(-1)
        if candidates.numel() >= count:
            return candidates[magnitudes[candidates].topk(count, sorted=False).indices]
    return magnitudes.topk(count, sorted=False).indices


class RandomK(Sparse):
    """A random fraction `ratio` of each parameter's elements, drawn in each step; the same on every rank.

    So indices need not be sent, and payloads can be summed. A parameter is cut into as many equal parts as elements
    are sent, and one element is drawn from each. So every element is sent with probability `ratio`, and none twice.

    Cost:
        `ratio` of the bytes, all-reduced: what each rank sends does not grow with their number.

    Source:
        Stich et al., "Sparsified SGD with Memory", NeurIPS 2018, section 2, with one draw from each part.
    """

    additive = True

    def payload_bytes(self, layout: Layout) -> int:
        return sum(self.num_sent(layout)) * layout.dtype.itemsize

    def compress(self, flat: Tensor, layout: Layout, seeds: Seeds) -> Tensor:
        values = flat[self._indices(layout, seeds.common)].to(layout.dtype)
        if values.numel():
            low, high = torch.aminmax(flat)
            values[0] += (low - low) + (high - high)  # 0, or NaN if anything here is not finite
        return values

    def add_decoded(
        self, target: Tensor, payload: Tensor, layout: Layout, common: int, sign: int = 1
    ) -> None:
        target.index_add_(0, self._indices(layout, common), payload.to(target.dtype), alpha=sign)

    def _indices(self, layout: Layout, common: int) -> Tensor:
        """Return the indices, in the bucket, of the elements that are sent, shape (k,)."""
        generator, start, indices = torch.Generator(), 0, []
        for size, position, count in zip(layout.sizes, layout.positions, self.num_sent(layout), strict=True):
            generator.manual_seed((common ^ (position * _SEED_SPREAD)) & (2**63 - 1))
            edges = torch.arange(count + 1) * size // max(count, 1)
            draws = torch.randint(1 << _DRAW_BITS, (count,), generator=generator)
            indices.append(start + edges[:-1] + (draws * edges.diff() >> _DRAW_BITS))
            start += size
        return from_host(torch.cat(indices), layout.device)
