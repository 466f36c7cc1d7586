"""Eight bits a number: a whole multiple of a scale that a block of 256 numbers shares."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.compression.blocks import Blocks, blocks_of
from paceline.compression.compressor import Compressor, Layout, Seeds
from paceline.compression.dither import dither_of

BLOCK = 256
LEVELS = 127
CHUNK_ROWS = 512  # worked on while they are in the cache


class Int8(Compressor):
    """Multiples of a scale, -127 to 127, for each block of 256 numbers of one parameter.

    Limits first: a block's error is up to 1/127 of its largest magnitude (half of that unless stochastic); magnitudes
    below 1e-36 are lost.

    Args:
        stochastic: Round up or down at random, so that the expectation is exact: no error feedback is needed. False:
            to nearest, for use with error feedback; then what is sent and what is left over are exactly what there was.

    Cost:
        1 byte a number and 2 a block: 0.252 of float32. Gathered, so P ranks send P-1 times that.

    Source:
        Alistarh et al., "QSGD", NeurIPS 2017, section 3, with the largest magnitude as the norm, and a scale for each
        block instead of the bucket: one outlier costs the precision of its 255 neighbours only.
    """

    additive = False

    def __init__(self, stochastic: bool = True) -> None:
        self.stochastic = stochastic
        self.needs_feedback = not stochastic

    def __repr__(self) -> str:
        return f"Int8(stochastic={self.stochastic})"

    def payload_bytes(self, layout: Layout) -> int:
        return layout.num_elements + 2 * blocks_of(layout, BLOCK).num_rows

    def compress(self, flat: Tensor, layout: Layout, seeds: Seeds) -> Tensor:
        blocks = blocks_of(layout, BLOCK)
        payload = torch.empty(self.payload_bytes(layout), dtype=torch.uint8, device=flat.device)
        scales, flat_levels = _parts(payload, blocks)
        rows, levels = blocks.rows(flat), blocks.room(flat_levels)
        dither = dither_of(seeds.private, BLOCK, flat.device) if self.stochastic else None
        for start in range(0, blocks.num_rows, CHUNK_ROWS):
            chunk = slice(start, start + CHUNK_ROWS)
            x = rows[chunk].float()
            scale = _scale_of(x)
            scales[chunk] = scale
            inverse = torch.where(scale > 0, scale.float().reciprocal(), 0.0)[:, None]
            if dither is None:
                x = (x * inverse).round_()
            else:
                x = torch.addcmul(dither.rows(blocks.numbers[chunk]), x, inverse).floor_()
            levels[chunk] = x.clamp_(-LEVELS, LEVELS)
        blocks.write(flat_levels, levels)
        return payload

    def add_decoded(
        self, target: Tensor, payload: Tensor, layout: Layout, common: int, sign: int = 1
    ) -> None:
        blocks = blocks_of(layout, BLOCK)
        scales, flat_levels = _parts(payload, blocks)
        levels, totals = blocks.rows(flat_levels), blocks.rows(target)
        for start in range(0, blocks.num_rows, CHUNK_ROWS):
            chunk = slice(start, start + CHUNK_ROWS)
            decoded = levels[chunk].to(target.dtype).mul_(scales[chunk].to(target.dtype)[:, None])
            totals[chunk].add_(decoded, alpha=sign)
        blocks.write(target, totals)


def _parts(payload: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """A payload's scales, shape (rows,), and levels, shape (N,)."""
    cut = 2 * blocks.num_rows
    return payload[:cut].view(torch.bfloat16), payload[cut:].view(torch.int8)


def _scale_of(x: Tensor) -> Tensor:
    """What one level stands for in each row, in bfloat16, so large that no magnitude exceeds 127 levels.

    Eight significant bits, so that levels times scale is exact, and with rounding to nearest so is what is left over.
    Not finite where the row is not.
    """
    return (x.abs().amax(dim=1) * ((1 + 2**-8) / LEVELS)).bfloat16()
