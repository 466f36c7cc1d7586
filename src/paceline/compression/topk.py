"""The elements of largest magnitude, with their places."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.compression.compressor import Layout, Seeds
from paceline.compression.sparse import Sparse

SAMPLED_FROM = 1 << 15  # smaller gradients are sorted as they are
STRIDE = 61  # of the sample; a prime, so that it visits every column of a matrix


class TopK(Sparse):
    """The share of each parameter's elements that is largest in magnitude, exactly.

    Args:
        ratio: The share, in (0, 1].

    Cost:
        A value and a 4-byte place an element: 2 x ratio of float32. Gathered, so P ranks send P-1 times that.

    Source:
        Lin et al., "Deep Gradient Compression", ICLR 2018, section 3. Their threshold from a sample finds
        candidates here, from which exactly the largest are taken.
    """

    additive = False

    def payload_bytes(self, layout: Layout) -> int:
        return sum(self.num_sent(layout)) * (layout.dtype.itemsize + 4)

    def compress(self, flat: Tensor, layout: Layout, seeds: Seeds) -> Tensor:
        payload = torch.empty(self.payload_bytes(layout), dtype=torch.uint8, device=flat.device)
        values, places = self._parts(payload, layout)
        counts, start = self.num_sent(layout), 0
        outputs = zip(values.split(counts), places.split(counts), strict=True)
        for piece, (value, place), count in zip(flat.split(list(layout.sizes)), outputs, counts, strict=True):
            chosen = largest(piece.abs(), count)
            value.copy_(piece[chosen])
            place.copy_(chosen).add_(start)
            start += piece.numel()
        return payload

    def add_decoded(
        self, target: Tensor, payload: Tensor, layout: Layout, common: int, sign: int = 1
    ) -> None:
        values, places = self._parts(payload, layout)
        target.index_add_(0, places, values.to(target.dtype), alpha=sign)

    def _parts(self, payload: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """A payload's values and their places in the bucket, shape (k,) each."""
        num_sent, width = sum(self.num_sent(layout)), layout.dtype.itemsize
        if width < 4:  # the wider ones lie first, so that both are aligned
            return payload[4 * num_sent :].view(layout.dtype), payload[: 4 * num_sent].view(torch.int32)
        return payload[: width * num_sent].view(layout.dtype), payload[width * num_sent :].view(torch.int32)


def largest(magnitudes: Tensor, count: int) -> Tensor:
    """The places of the `count` largest of a 1-D tensor, in no particular order; NaN is larger than all numbers.

    Few of many are found by a threshold that a sample says some more exceed. So one pass and a sort of the few replace
    a sort of the many; if the sample was wrong, there are too few, and the many are sorted.
    """
    size = magnitudes.numel()
    if size >= SAMPLED_FROM and 8 * count < size:
        sample = magnitudes[::STRIDE]
        expected = count * sample.numel() / size
        above = math.ceil(expected + 4 * math.sqrt(expected) + 2)
        threshold = sample.topk(above, sorted=True).values[-1]
        candidates = (magnitudes <= threshold).logical_not_().nonzero().view(-1)
        if candidates.numel() >= count:
            return candidates[magnitudes[candidates].topk(count, sorted=False).indices]
    return magnitudes.topk(count, sorted=False).indices
