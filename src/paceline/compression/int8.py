"""8-bit quantization with one scale for every 256 elements, and stochastic rounding by a table of random thresholds."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from paceline.compression.compressor import Blocks, Compressor, Layout, Seeds, blocks_of

BLOCK = 256  # elements that share a scale
LEVELS = 127
CHUNK_ROWS = 512  # processed at a time: they fit in the cache
DITHER_ROWS = 256
_DITHER_SEED = 20260  # the table is a constant; random is only how it is shifted


class Int8(Compressor):
    """Integers from -127 to 127, times a scale for each block of 256 elements of one parameter.

    Limits first: a block's error is up to 1/127 of its largest magnitude (half of that unless stochastic); magnitudes
    below 1e-36 are lost.

    Args:
        stochastic: Round up or down at random, so that the expectation is exact: no error feedback is needed. False:
            to nearest, for use with error feedback; then payload plus residual is exactly the gradient.

    Cost:
        1 byte an element and 2 a block: 0.252 of float32. Gathered, so each of P ranks sends P-1 times that.

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
    """Return the payload's scales, shape (rows,), and levels, shape (N,)."""
    cut = 2 * blocks.num_rows
    return payload[:cut].view(torch.bfloat16), payload[cut:].view(torch.int8)


def _scale_of(x: Tensor) -> Tensor:
    """Return the value of one level in each row, bfloat16, shape (rows,). No magnitude exceeds 127 levels.

    It has eight significant bits, so level times scale is exact, and with rounding to nearest so is the residual.
    Not finite where the row is not.
    """
    return (x.abs().amax(dim=1) * ((1 + 2**-8) / LEVELS)).bfloat16()


@lru_cache(maxsize=8)
def _thresholds(length: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(_DITHER_SEED)
    order = torch.rand(DITHER_ROWS, length, generator=generator).argsort(dim=0)
    return (order.float() / DITHER_ROWS).to(device)


@lru_cache(maxsize=8)
def dither_of(seed: int, length: int, device: torch.device) -> Dither:
    """Return the thresholds of one rank in one step, cached: all buckets of the step use them."""
    return Dither(seed, length, device)


class Dither:
    """Random thresholds for stochastic rounding, of one rank in one step, from a table.

    This is a hundred times faster than one draw for each element. The element in column c of a row is rounded up if its
    fraction exceeds one minus the table's entry at (that row, c). The step and the rank draw by how much rows are
    shifted. Every column of the table holds each of (0, 1, ...)/DITHER_ROWS once, in random order. A jitter smaller
    than 1/DITHER_ROWS is drawn once per step. So over draws each threshold is uniform in [0, 1), and rounding is
    unbiased. Elements of a column that are a multiple of DITHER_ROWS rows apart share a threshold in a step.
    """

    def __init__(self, seed: int, length: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._shift = int(torch.randint(DITHER_ROWS, (), generator=generator))
        jitter = float(torch.rand((), generator=generator, dtype=torch.float64)) / DITHER_ROWS
        self._table = _thresholds(length, device) + min(jitter, (1 - 2**-12) / DITHER_ROWS)

    def rows(self, numbers: Tensor) -> Tensor:
        """Return thresholds in [0, 1), shape (n, length), for rows of the model, given by their numbers, shape (n,)."""
        return self._table.index_select(0, (numbers + self._shift) % DITHER_ROWS)
