"""Elements chosen at random, the same ones on every rank: their places need not be sent, and they can be summed."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.compression.compressor import Layout, Seeds
from paceline.compression.sparse import Sparse

_BITS = 31
_SPREAD = 0x9E3779B97F4A7C15  # odd, so that different positions give different seeds


class RandomK(Sparse):
    """A share of each parameter's elements, chosen anew in each step.

    A parameter is cut into as many equal parts as elements are sent, and one is drawn from each: every element comes up
    with probability `ratio` (parts that differ by one element aside), and none twice.

    Args:
        ratio: The share, in (0, 1].

    Cost:
        `ratio` of the bytes, summed on the wire: what each rank sends does not grow with their number.

    Source:
        Stich et al., "Sparsified SGD with Memory", NeurIPS 2018, section 2, with one draw from each part.
    """

    additive = True

    def payload_bytes(self, layout: Layout) -> int:
        return sum(self.num_sent(layout)) * layout.dtype.itemsize

    def compress(self, flat: Tensor, layout: Layout, seeds: Seeds) -> Tensor:
        values = flat[self._places(layout, seeds.common)].to(layout.dtype)
        if values.numel():
            low, high = torch.aminmax(flat)
            values[0] += (low - low) + (high - high)  # 0, or NaN if anything here is not finite
        return values

    def add_decoded(
        self, target: Tensor, payload: Tensor, layout: Layout, common: int, sign: int = 1
    ) -> None:
        target.index_add_(0, self._places(layout, common), payload.to(target.dtype), alpha=sign)

    def _places(self, layout: Layout, common: int) -> Tensor:
        """In the bucket, shape (k,)."""
        generator, start, places = torch.Generator(), 0, []
        for size, position, count in zip(layout.sizes, layout.positions, self.num_sent(layout), strict=True):
            generator.manual_seed((common ^ (position * _SPREAD)) & (2**63 - 1))
            edges = torch.arange(count + 1) * size // max(count, 1)
            draws = torch.randint(1 << _BITS, (count,), generator=generator)
            places.append(start + edges[:-1] + (draws * edges.diff() >> _BITS))
            start += size
        return torch.cat(places).to(layout.device)
