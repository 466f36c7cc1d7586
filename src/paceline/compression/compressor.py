"""The seam of compression: one rank says its gradients shorter, and decodes what such words say.

Rules
1. A compressor knows one rank only. Who exchanges payloads, and whether they are summed or gathered, is a reduction's
   business (`reductions/compressed.py`); `additive` says what it may do.
2. What becomes of a gradient does not depend on its neighbours in the bucket, because buckets are cut anew after the
   first step: training that resumes must arrive at the same bits. So scales, choices and random numbers are per
   parameter, or per block of one.
3. The size of a payload follows from the layout alone, never from the values: it is the same on all ranks.
4. What is not finite stays not finite after decoding, at one element of the bucket at least. Nothing is hidden.
5. Random numbers follow from the seeds handed in. No global generator is touched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.errors import ConfigurationError


@dataclass(frozen=True)
class Layout:
    """Whose gradients lie in a bucket, one behind the other.

    Attributes:
        sizes: Of each gradient, in real elements.
        positions: How many elements of the model come before each, in registration order: what random choices depend
            on, so that they do not depend on how buckets are cut.
        dtype: Of the bucket.
        device: Of the bucket.
    """

    sizes: tuple[int, ...]
    positions: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, *tensors: Tensor) -> Layout:
        """The layout of these gradients alone, as if they were the whole model."""
        sizes = tuple(tensor.numel() for tensor in tensors)
        positions = tuple(sum(sizes[:place]) for place in range(len(sizes)))
        return cls(sizes, positions, tensors[0].dtype, tensors[0].device)

    @property
    def num_elements(self) -> int:
        return sum(self.sizes)

    @property
    def num_bytes(self) -> int:
        """Of the bucket as it is: what a reduction without compression sends."""
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True)
class Seeds:
    """Where a compressor's random numbers come from in one step.

    Attributes:
        common: The same on all ranks.
        private: This rank's own.
    """

    common: int
    private: int


def widened(dtype: torch.dtype) -> torch.dtype:
    """In what gradients of this dtype are summed, and what is left of them is kept: float32 or float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Compressor(ABC):
    """How one rank says its gradients shorter. Holds settings only; what was left out is kept by the reduction."""

    additive: ClassVar[bool]
    """Whether the sum of ranks' payloads, elementwise, is the payload of their sum: it may be reduced on the wire."""
    needs_feedback: bool = False
    """Whether training needs what was left out to be sent later (error feedback)."""
    is_sparse: ClassVar[bool] = False
    """Whether it sends some elements as they are and leaves out the others."""

    def __repr__(self) -> str:
        """Its kind and settings: equal on all ranks."""
        return type(self).__name__

    def check(self, name: str, dtype: torch.dtype) -> None:
        """Refuse a parameter whose gradients cannot be said so. Local.

        Args:
            name: Of the parameter, for the message.
            dtype: Of its gradient's buffer: real.

        Raises:
            ConfigurationError: Names the parameter and says what to do.
        """
        if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise ConfigurationError(
                f"{self!r} cannot compress the gradient of {name!r}, which is {dtype}: it knows float16, bfloat16, "
                "float32 and float64. Cast the parameter, or leave it out of the synchronization "
                "(_set_params_and_buffers_to_ignore_for_model)."
            )

    @abstractmethod
    def payload_bytes(self, layout: Layout) -> int:
        """How many bytes `compress` returns for such a bucket. Local."""

    @abstractmethod
    def compress(self, flat: Tensor, layout: Layout, seeds: Seeds) -> Tensor:
        """Say `flat` shorter.

        Args:
            flat: Contiguous, shape (N,), of the layout's dtype or wider; unchanged.
            layout: What lies in it.
            seeds: For what is random.

        Returns:
            A tensor of its own, shape (n,), with `payload_bytes(layout)` bytes. If the compressor is additive, of a
            dtype whose sums mean the sum; else of bytes (uint8).

        Contract:
            Local. The same arguments give the same bits.
        """

    @abstractmethod
    def add_decoded(
        self, target: Tensor, payload: Tensor, layout: Layout, common: int, sign: int = 1
    ) -> None:
        """Add what a payload says, or subtract it.

        Args:
            target: Shape (N,), of dtype `widened(layout.dtype)`; mutated.
            payload: As `compress` returned it on any rank, or the sum of several if the compressor is additive.
            layout: As for `compress`.
            common: `Seeds.common` of the step.
            sign: 1 or -1.

        Contract:
            Local. The same arguments give the same bits.
        """

    def decompress(self, payload: Tensor, layout: Layout, common: int) -> Tensor:
        """What a payload says, shape (N,), of dtype `widened(layout.dtype)`. Local."""
        decoded = torch.zeros(layout.num_elements, dtype=widened(layout.dtype), device=payload.device)
        self.add_decoded(decoded, payload, layout, common)
        return decoded
