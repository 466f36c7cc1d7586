"""Counts of samples and tokens in a forward's arguments: the first tensor's first dimension, and its whole numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def samples_and_tokens(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return both; None if unknown. Local; reads shapes only."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim():
            has_tokens = value.dim() > 1 and not value.is_floating_point() and not value.is_complex()
            return value.size(0), value.numel() if has_tokens else None
    return None, None


class BatchCounts:
    """Counts of the samples and tokens that the forwards of one step were given; None where unknown."""

    has_begun = False  # a forward was counted
    samples: int | None = None
    tokens: int | None = None

    def add(self, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Count another forward, of these arguments."""
        samples, tokens = samples_and_tokens(inputs, kwargs)
        if not self.has_begun:
            self.samples, self.tokens = samples, tokens
        elif samples is not None:
            self.samples = (self.samples or 0) + samples
            self.tokens = None if tokens is None else (self.tokens or 0) + tokens
        self.has_begun = True
