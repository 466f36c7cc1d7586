"""The interface of a compressor: turns one rank's gradient bucket into a shorter payload, and payloads into gradients.

Rules
1. A compressor is local: it never communicates. `reductions/compressed.py` exchanges payloads; `additive` says whether
   it may sum them on the wire or has to gather them.
2. The result for one gradient does not depend on its neighbours in the bucket, because buckets are rebuilt after the
   first step: training that resumes must arrive at the same bits. So scales, choices and random numbers are per
   parameter, or per block of one.
3. The size of a payload follows from the layout alone, never from the values: it is the same on all ranks.
4. If a bucket contains an infinity or NaN, so does its decompressed payload, in at least one element: an overflow is
   never hidden.
5. Random numbers follow from the seeds passed in. No global generator is touched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from paceline.errors import ConfigurationError


@dataclass(frozen=True)
class Layout:
    """The gradients that lie in a bucket, one after the other.

    Attributes:
        sizes: The real elements of each gradient.
        positions: How many elements of the model come before each gradient, in registration order. Random choices
            depend on it, so that they do not depend on how buckets are cut.
        dtype: Dtype of the bucket.
        device: Device of the bucket.
    """

    sizes: tuple[int, ...]
    positions: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, *tensors: Tensor) -> Layout:
        """Return the layout of a bucket with these real gradients, as if they were the whole model."""
        sizes = tuple(tensor.numel() for tensor in tensors)
        positions = tuple(sum(sizes[:place]) for place in range(len(sizes)))
        return cls(sizes, positions, tensors[0].dtype, tensors[0].device)

    @property
    def num_elements(self) -> int:
        return sum(self.sizes)

    @property
    def num_bytes(self) -> int:
        """Return the size of the bucket without compression."""
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True)
class Seeds:
    """The seeds of a compressor's random numbers in one step.

    Attributes:
        common: The same on all ranks.
        private: Different on every rank.
    """

    common: int
    private: int


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and residuals of gradients of `dtype`: float64 for itself, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Compressor(ABC):
    """Compresses one rank's gradients. Holds settings only; residuals are kept by the reduction.

    Derive from it and implement `payload_bytes`, `compress` and `add_decoded`.
    """

    additive: ClassVar[bool]
    """Whether the elementwise sum of the ranks' payloads is the payload of their sum, so that it can be all-reduced."""
    needs_feedback: bool = False
    """Whether training needs error feedback: what a payload lacks is added to the next step's gradient."""
    is_sparse: ClassVar[bool] = False
    """Whether it sends some elements unchanged and leaves out the others."""

    def __repr__(self) -> str:
        return type(self).__name__  # with settings where there are any: equal on all ranks, which compare it

    def check(self, name: str, dtype: torch.dtype) -> None:
        """Raise ConfigurationError if gradients of this real dtype cannot be compressed. Names the parameter. Local."""
        if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise ConfigurationError(
                f"{self!r} cannot compress the gradient of {name!r}, which is {dtype}: it knows float16, bfloat16, "
                "float32 and float64. Cast the parameter, or leave it out of the synchronization "
                "(_set_params_and_buffers_to_ignore_for_model)."
            )

    @abstractmethod
    def payload_bytes(self, layout: Layout) -> int:
        """Return the size of the payload that `compress` makes of a bucket with this layout. Local."""

    @abstractmethod
    def compress(self, flat: Tensor, layout: Layout, seeds: Seeds) -> Tensor:
        """Compress a bucket.

        Args:
            flat: Contiguous, shape (N,), of the layout's dtype or wider; unchanged.
            layout: Which gradients lie in it.
            seeds: Seeds for this step's random numbers.

        Returns:
            The payload: a new tensor, shape (n,), of `payload_bytes(layout)` bytes. Its dtype is numeric if the
            compressor is additive, so that it can be summed; otherwise uint8.

        Contract:
            Local. The same arguments give the same bits.
        """

    @abstractmethod
    def add_decoded(
        self, target: Tensor, payload: Tensor, layout: Layout, common: int, sign: int = 1
    ) -> None:
        """Decompress a payload and add it to `target`, or subtract it.

        Args:
            target: Shape (N,), of dtype `accumulation_dtype(layout.dtype)`; mutated.
            payload: From `compress` on any rank; or, if the compressor is additive, the sum of several.
            layout: As for `compress`.
            common: `Seeds.common` of the step.
            sign: 1 to add, -1 to subtract.

        Contract:
            Local. The same arguments give the same bits.
        """

    def decompress(self, payload: Tensor, layout: Layout, common: int) -> Tensor:
        """Return the decompressed payload: new, shape (N,), of dtype `accumulation_dtype(layout.dtype)`. Local."""
        dtype = accumulation_dtype(layout.dtype)
        decoded = torch.zeros(layout.num_elements, dtype=dtype, device=payload.device)
        self.add_decoded(decoded, payload, layout, common)
        return decoded


def from_host(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device, through pinned memory, so that the host does not wait."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Blocks:
    """A bucket as a matrix: every gradient cut into rows of `length` elements, its last row padded with zeros.

    For compressors with a scale for each row, which then depends on one gradient only (rule 2).
    """

    def __init__(self, layout: Layout, length: int) -> None:
        self.length = length
        self.sizes = layout.sizes
        self.rows_of = tuple(-(-size // length) for size in layout.sizes)
        self.num_rows = sum(self.rows_of)
        starts = [position // length for position in layout.positions]
        spans = zip(starts, self.rows_of, strict=True)
        numbers = [torch.arange(start, start + rows) for start, rows in spans]
        self.numbers = torch.cat(numbers).to(layout.device) if numbers else torch.empty(0, dtype=torch.int64)
        """Each row's number in the model, shape (rows,); independent of how buckets are cut."""
        counts = [
            min(size - row * length, length)
            for size, n in zip(self.sizes, self.rows_of, strict=True)
            for row in range(n)
        ]
        self.counts = torch.tensor(counts, dtype=torch.float32, device=layout.device)
        """How many elements of each row are not padding, shape (rows,)."""
        self._is_unpadded = all(size % length == 0 for size in layout.sizes)

    def rows(self, flat: Tensor) -> Tensor:
        """Return the rows of `flat`, shape (rows, length): a view if nothing is padded, else a copy."""
        if self._is_unpadded:
            return flat.view(self.num_rows, self.length)
        padded = flat.new_zeros(self.num_rows * self.length)
        if flat.numel():
            torch._foreach_copy_(self._without_padding(padded), self._pieces(flat))
        return padded.view(self.num_rows, self.length)

    def room(self, flat: Tensor) -> Tensor:
        """Return rows for the elements of `flat`, uninitialized and a view if possible. Fill them and call `write`."""
        if self._is_unpadded:
            return flat.view(self.num_rows, self.length)
        return flat.new_empty(self.num_rows, self.length)

    def write(self, flat: Tensor, rows: Tensor) -> None:
        """Copy `rows`, which `rows` or `room` returned for `flat`, back into it without the padding."""
        if not self._is_unpadded and flat.numel():
            torch._foreach_copy_(self._pieces(flat), self._without_padding(rows.view(-1)))

    def _pieces(self, flat: Tensor) -> list[Tensor]:
        return list(flat.split(list(self.sizes)))

    def _without_padding(self, padded: Tensor) -> list[Tensor]:
        lengths = [num_rows * self.length for num_rows in self.rows_of]
        return [piece[:size] for piece, size in zip(padded.split(lengths), self.sizes, strict=True)]


@lru_cache(maxsize=1024)
def blocks_of(layout: Layout, length: int) -> Blocks:
    """Return the blocks of a layout, cached: buckets are the same in every step."""
    return Blocks(layout, length)
