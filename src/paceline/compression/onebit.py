"""1-bit quantization: the sign of every element, and the mean magnitude of every 512."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from paceline.compression.compressor import Blocks, Compressor, Layout, Seeds, blocks_of

BLOCK = 512  # elements that share a magnitude
CHUNK_ROWS = 256  # processed at a time: they fit in the cache

# Eight bytes of 0 or 1, read as one int64, times _GATHER_BITS: their bits are in the highest byte, the first lowest.
_LOWEST_BITS = 0x0101010101010101
_GATHER_BITS = 0x0102040810204080


class OneBit(Compressor):
    """Signs, times the mean magnitude of 512 elements of one parameter.

    Limits first: useless without error feedback, and where gradients are mostly zero (a sign has no third value).

    Cost:
        1.03 bits an element: 0.032 of float32. Gathered, so each of P ranks sends P-1 times that.

    Source:
        Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014: signs and error feedback. One magnitude for
        both signs: Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019, section 4.
    """

    additive = False
    needs_feedback = True

    def payload_bytes(self, layout: Layout) -> int:
        return 2 * blocks_of(layout, BLOCK).num_rows + sum(-(-size // 8) for size in layout.sizes)

    def compress(self, flat: Tensor, layout: Layout, seeds: Seeds) -> Tensor:
        blocks, packed = _blocks(layout)
        payload = torch.empty(self.payload_bytes(layout), dtype=torch.uint8, device=flat.device)
        scales, flat_bits = _parts(payload, blocks)
        rows, bits = blocks.rows(flat), packed.room(flat_bits)
        for start in range(0, blocks.num_rows, CHUNK_ROWS):
            chunk = slice(start, start + CHUNK_ROWS)
            x = rows[chunk].float()
            scales[chunk] = x.abs().sum(dim=1) / blocks.counts[chunk]
            # 0 or -1 (all bits set) a byte
            is_negative = (x.view(torch.int32) >> 31).to(torch.int8).view(torch.int64)
            bits[chunk] = is_negative.bitwise_and_(_LOWEST_BITS).mul_(_GATHER_BITS).bitwise_right_shift_(56)
        packed.write(flat_bits, bits)
        return payload

    def add_decoded(
        self, target: Tensor, payload: Tensor, layout: Layout, common: int, sign: int = 1
    ) -> None:
        blocks, packed = _blocks(layout)
        scales, flat_bits = _parts(payload, blocks)
        bits, totals, table = packed.rows(flat_bits), blocks.rows(target), _signs(target.dtype, target.device)
        for start in range(0, blocks.num_rows, CHUNK_ROWS):
            chunk = slice(start, start + CHUNK_ROWS)
            scale = scales[chunk].to(target.dtype)[:, None] * sign
            signs = table.index_select(0, bits[chunk].reshape(-1).int()).view(-1, BLOCK)
            totals[chunk].add_(signs.mul_(scale))
        blocks.write(target, totals)


@lru_cache(maxsize=8)
def _signs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the eight signs that each byte encodes, 1 or -1, shape (256, 8)."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return (1 - 2 * bits).to(device=device, dtype=dtype)


def _blocks(layout: Layout) -> tuple[Blocks, Blocks]:
    """Return blocks of the elements, and of the bytes that hold eight signs each; both have equally many rows."""
    num_bytes = tuple(-(-size // 8) for size in layout.sizes)
    bytes_layout = Layout(num_bytes, layout.positions, torch.uint8, layout.device)
    return blocks_of(layout, BLOCK), blocks_of(bytes_layout, BLOCK // 8)


def _parts(payload: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Return a payload's magnitudes, shape (rows,), and its signs, eight per byte, shape (bytes,)."""
    cut = 2 * blocks.num_rows
    return payload[:cut].view(torch.bfloat16), payload[cut:]
