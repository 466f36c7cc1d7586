"""Gradients as rows of equal length, each of one parameter: what shares a scale."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from paceline.compression.compressor import Layout


class Blocks:
    """How a bucket is seen as a matrix with `length` columns; a parameter's last row is filled up with zeros.

    So a scale a row is one of a single parameter, whatever lies beside it in the bucket.
    """

    def __init__(self, layout: Layout, length: int) -> None:
        self.length = length
        self.sizes = layout.sizes
        self.rows_of = tuple(-(-size // length) for size in layout.sizes)
        self.num_rows = sum(self.rows_of)
        starts = [position // length for position in layout.positions]
        numbers = [
            torch.arange(start, start + rows) for start, rows in zip(starts, self.rows_of, strict=True)
        ]
        self.numbers = torch.cat(numbers).to(layout.device) if numbers else torch.empty(0, dtype=torch.int64)
        """Each row's number in the model, shape (rows,): however buckets are cut."""
        filled = [
            min(size - row * length, length)
            for size, n in zip(self.sizes, self.rows_of, strict=True)
            for row in range(n)
        ]
        self.counts = torch.tensor(filled, dtype=torch.float32, device=layout.device)
        """How many elements each row has that were not filled up, shape (rows,)."""
        self._is_plain = all(size % length == 0 for size in layout.sizes)

    def rows(self, flat: Tensor) -> Tensor:
        """Shape (rows, length); a view of `flat` where no row has to be filled up, else a copy."""
        if self._is_plain:
            return flat.view(self.num_rows, self.length)
        padded = flat.new_zeros(self.num_rows * self.length)
        if flat.numel():
            torch._foreach_copy_(self._filled(padded), self._pieces(flat))
        return padded.view(self.num_rows, self.length)

    def room(self, flat: Tensor) -> Tensor:
        """Rows to be written before `write` puts them into `flat`; its contents are undefined."""
        if self._is_plain:
            return flat.view(self.num_rows, self.length)
        return flat.new_empty(self.num_rows, self.length)

    def write(self, flat: Tensor, rows: Tensor) -> None:
        """Put the rows' elements, without what was filled up, into `flat`; nothing to do if it was a view."""
        if not self._is_plain and flat.numel():
            torch._foreach_copy_(self._pieces(flat), self._filled(rows.view(-1)))

    def _pieces(self, flat: Tensor) -> list[Tensor]:
        return list(flat.split(list(self.sizes)))

    def _filled(self, padded: Tensor) -> list[Tensor]:
        lengths = [num_rows * self.length for num_rows in self.rows_of]
        return [piece[:size] for piece, size in zip(padded.split(lengths), self.sizes, strict=True)]


@lru_cache(maxsize=1024)
def blocks_of(layout: Layout, length: int) -> Blocks:
    """The blocks of a layout; remembered, because buckets are the same in every step."""
    return Blocks(layout, length)
