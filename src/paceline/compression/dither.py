"""Random thresholds for stochastic rounding, from a table: a hundred times faster than one draw an element.

An element at column c of a row rounds up if its fraction exceeds one minus the table's entry at (that row, c), where
the step and the rank draw by how much rows are shifted. Every column of the table holds each of (0, 1, ...)/ROWS once,
in random order, and a jitter smaller than 1/ROWS is drawn once a step; so over draws each threshold is uniform in
[0, 1), and rounding is unbiased. Elements in the same column, a multiple of ROWS rows apart, share it in a step.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

ROWS = 256
_TABLE_SEED = 20260  # the table is a constant; what is random is how it is shifted


@lru_cache(maxsize=8)
def _table(length: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(_TABLE_SEED)
    order = torch.rand(ROWS, length, generator=generator).argsort(dim=0)
    return (order.float() / ROWS).to(device)


@lru_cache(maxsize=8)
def dither_of(seed: int, length: int, device: torch.device) -> Dither:
    """The thresholds of one rank in one step; remembered, because all buckets of the step ask for them."""
    return Dither(seed, length, device)


class Dither:
    """The thresholds of one rank in one step.

    Args:
        seed: From which the shift and the jitter are drawn.
        length: Of a row.
        device: Where they are needed.
    """

    def __init__(self, seed: int, length: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._shift = int(torch.randint(ROWS, (), generator=generator))
        jitter = float(torch.rand((), generator=generator, dtype=torch.float64)) / ROWS
        self._table = _table(length, device) + min(jitter, (1 - 2**-12) / ROWS)

    def rows(self, numbers: Tensor) -> Tensor:
        """Thresholds in [0, 1), shape (n, length), for the rows of the model with these numbers, shape (n,)."""
        return self._table.index_select(0, (numbers + self._shift) % ROWS)
