"""Gradient compressors, local to one rank: casts, quantization, signs, sparsification."""

from paceline.compression.cast import Bf16, Cast, Fp16
from paceline.compression.compressor import Compressor, Layout, Seeds, accumulation_dtype
from paceline.compression.int8 import Int8
from paceline.compression.onebit import OneBit
from paceline.compression.sparsification import RandomK, TopK

BY_NAME: dict[str, type[Compressor]] = {
    "fp16": Fp16,
    "bf16": Bf16,
    "int8": Int8,
    "onebit": OneBit,
    "topk": TopK,
    "randomk": RandomK,
}
"""Every compressor, under the name that `compression=` takes."""

__all__ = [
    "BY_NAME",
    "Bf16",
    "Cast",
    "Compressor",
    "Fp16",
    "Int8",
    "Layout",
    "OneBit",
    "RandomK",
    "Seeds",
    "TopK",
    "accumulation_dtype",
]
