"""Sending some elements as they are, and leaving out the others until later."""

from __future__ import annotations

import math

from paceline.compression.compressor import Compressor, Layout
from paceline.errors import ConfigurationError


class Sparse(Compressor):
    """A share of every parameter's elements, at least one. Final classes say which.

    Args:
        ratio: The share, in (0, 1].
    """

    needs_feedback = True
    is_sparse = True

    def __init__(self, ratio: float = 0.01) -> None:
        if not 0 < ratio <= 1:
            raise ConfigurationError(
                f"{type(self).__name__}: ratio={ratio} must be more than 0 and at most 1: the share of elements "
                "that is sent in each step. 0.01 is usual."
            )
        self.ratio = ratio

    def __repr__(self) -> str:
        return f"{type(self).__name__}(ratio={self.ratio})"

    def num_sent(self, layout: Layout) -> tuple[int, ...]:
        """How many elements of each gradient are sent."""
        return tuple(min(size, math.ceil(self.ratio * size)) for size in layout.sizes)
