"""Casts to float16 or bfloat16, rounded to nearest."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from paceline.compression.compressor import Compressor, Layout, Seeds
from paceline.errors import ConfigurationError

CHUNK_ELEMENTS = 1 << 16  # converted and added at a time: they fit in the cache


class Cast(Compressor):
    """A compressor that converts every element to a 16-bit dtype. Subclasses name the dtype.

    Cost:
        Half the bytes of float32. Reads and writes every element once, near the speed of memory.
    """

    additive = True
    dtype: ClassVar[torch.dtype]

    def check(self, name: str, dtype: torch.dtype) -> None:
        super().check(name, dtype)
        if dtype.itemsize == self.dtype.itemsize and dtype != self.dtype:
            raise ConfigurationError(
                f"{self!r} would send the gradient of {name!r}, which is {dtype}, in as many bytes as it has, and lose "
                "precision or range for nothing. Take the compressor of that dtype, "
                f"{'Bf16' if dtype == torch.bfloat16 else 'Fp16'}, or one dtype for all parameters."
            )

    def payload_bytes(self, layout: Layout) -> int:
        return layout.num_elements * self.dtype.itemsize

    def compress(self, flat: Tensor, layout: Layout, seeds: Seeds) -> Tensor:
        return flat.to(self.dtype, copy=True)

    def add_decoded(
        self, target: Tensor, payload: Tensor, layout: Layout, common: int, sign: int = 1
    ) -> None:
        # In pieces: torch adds tensors of two dtypes some ten times slower than it converts one and adds two of one.
        for total, piece in zip(target.split(CHUNK_ELEMENTS), payload.split(CHUNK_ELEMENTS), strict=True):
            total.add_(piece.to(target.dtype), alpha=sign)


class Fp16(Cast):
    """IEEE half precision: 11 significant bits, magnitudes from 6e-8 to 65504.

    Limits first: larger values become infinite, and the step has to be skipped (`Lossy.overflowed`); smaller ones
    become zero. Scale the loss (`torch.amp.GradScaler`), or take `Bf16`.
    """

    dtype = torch.float16


class Bf16(Cast):
    """Bfloat16: the range of float32 with 8 significant bits."""

    dtype = torch.bfloat16
