"""How one rank says its gradients SHORTER: casts, quantisation, signs, and choosing some."""

from paceline.compression.cast import Bf16, Cast, Fp16
from paceline.compression.compressor import Compressor, Layout, Seeds, widened
from paceline.compression.int8 import Int8
from paceline.compression.onebit import OneBit
from paceline.compression.randomk import RandomK
from paceline.compression.topk import TopK

BY_NAME: dict[str, type[Compressor]] = {
    "fp16": Fp16,
    "bf16": Bf16,
    "int8": Int8,
    "onebit": OneBit,
    "topk": TopK,
    "randomk": RandomK,
}
"""Every compressor, with its default settings."""

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
    "widened",
]
