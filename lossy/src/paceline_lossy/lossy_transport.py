"""The interface of a transport that may lose a bounded part of what it sums, and says how much; its records.

It is not a `Transport`: whoever uses it has to say what may be lost, and to look at what was.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.comm import Completion
from paceline.errors import ConfigurationError
from paceline.numbers_given import number


@dataclass(frozen=True)
class Bound:
    """What may be lost of a vector in its reduce-scatter.

    Attributes:
        ratio: The largest part of the droppable bytes of each transfer that may be lost, at least 0 and less than 1.
        protected_ratio: The part of the chunks, those of the largest mean magnitude, that may not be lost.
        is_scaled: Whether the sum of what arrived is scaled up to estimate the sum of all; otherwise lost chunks count
            as zero.
        priority: 1 to 5: the class selector (DSCP) of its datagrams. Larger ones are also sent first. Those that may be
            lost are then not ECN-capable. With 0 all are ECN-capable, of the default class.
        is_early: Whether a transfer ends as soon as the part that may not be lost is here. What is still under way is
            then lost, also on a network that loses nothing.
    """

    ratio: float
    protected_ratio: float = 0.0
    is_scaled: bool = True
    priority: int = 0
    is_early: bool = False

    def __post_init__(self) -> None:
        if not 0 <= number(self.ratio) < 1:
            raise ConfigurationError(
                f"a bound of {self.ratio!r} is not possible: the part of a transfer that may be lost is at least 0 and "
                "less than 1. Give 0.01 for one percent."
            )
        if not 0 <= number(self.protected_ratio) <= 1:
            raise ConfigurationError(
                f"protected_ratio={self.protected_ratio!r} must be from 0 to 1, a part of the chunks."
            )
        if self.priority not in range(6):
            raise ConfigurationError(
                f"a priority of {self.priority} is not possible. Networks leave the class selectors 1 to 5 to users. "
                "Give one of them, or 0 for none."
            )


@dataclass(frozen=True)
class Losses:
    """What was lost of a vector that has been summed.

    Attributes:
        collective: Its number.
        missing: For each rank, how many contributions (a chunk from a peer) did not arrive for its shard.
        expected: For each rank, how many were sent to it.
        ranges: What they were, shape (L, 3): the source's rank, the first element of the vector and the end. The same
            on every rank.
    """

    collective: int
    missing: tuple[int, ...]
    expected: tuple[int, ...]
    ranges: NDArray[np.int64]


def joined(parts: Sequence[tuple[int, Losses]]) -> Losses:
    """The losses of a vector that was summed in parts: pairs of a part's first element and its losses, in order."""
    shifts = [np.array([0, first, first]) for first, _ in parts]
    return Losses(
        collective=parts[0][1].collective,
        missing=tuple(map(sum, zip(*(losses.missing for _, losses in parts), strict=True))),
        expected=tuple(map(sum, zip(*(losses.expected for _, losses in parts), strict=True))),
        ranges=np.concatenate(
            [losses.ranges + shift for (_, losses), shift in zip(parts, shifts, strict=True)]
        ),
    )


class Sum(Completion):
    """A sum that has been launched on a link: a `Work`, which ends on the link's thread."""

    def __init__(self, vector: NDArray[Any], bound: Bound) -> None:
        super().__init__()
        self.vector = vector
        self.bound = bound
        self.launched_s = time.monotonic()
        self.losses: Losses | None = None
        """What was lost; set when it is done."""

    def end(self, losses: Losses | None, error: Exception | None = None) -> None:
        """Wake up those who wait. By the link alone."""
        self.losses = losses
        self.complete(error)


class LossyTransport(ABC):
    """Sums vectors over `num_ranks` ranks; this one is `rank`."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks

    @abstractmethod
    def launch(self, vector: NDArray[Any], bound: Bound) -> Sum:
        """Start replacing `vector` by the sum over the ranks, the same bits on all of them.

        Args:
            vector: Shape (N,), N > 0, float32 or float64, contiguous; mutated until the result is done.
            bound: What may be lost; the same on every rank.

        Contract:
            Collective: every rank, same order, the same N and dtype.  Blocks: no.
        """

    @property
    @abstractmethod
    def counters(self) -> dict[str, int]:
        """Datagrams: sent, repeated, of strangers, duplicates, replayed, of finished sums, with congestion marks."""

    @abstractmethod
    def close(self, timeout_s: float) -> bool:
        """Leave, after peers have what they need of this rank; returns whether nothing is left."""
