"""The interface of a transport that sums vectors, may lose a bounded part of them and reports the loss; its records.

It is not a `Transport`: its caller has to set a bound and to look at the losses.
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
from paceline.given import number


@dataclass(frozen=True)
class Bound:
    """The part of a vector that may be lost in its reduce-scatter.

    Attributes:
        ratio: The largest part of the droppable bytes of each transfer that may be lost, at least 0 and less than 1.
        protected_ratio: The part of the chunks, those of the largest mean magnitude, that may not be lost.
        is_scaled: Whether the sum of what arrived is scaled up to estimate the sum of all; otherwise lost chunks count
            as zero.
        priority: 1 to 5: the class selector (DSCP) of its datagrams. Larger ones are also sent first. Those that may be
            lost are then not ECN-capable. With 0 all are ECN-capable, of the default class.
        is_early: Whether a transfer ends as soon as the part that may not be lost is here. Datagrams still under way
            are then lost, also on a network that loses nothing.
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
    """The losses of one vector that was summed. A contribution is a chunk from a peer.

    Attributes:
        collective: The number of the collective that summed it.
        missing: For each rank, how many contributions to its shard did not arrive.
        expected: For each rank, how many contributions were sent to it.
        ranges: The missing parts, shape (L, 3): the source's rank, the first element of the vector and the end. The
            same on every rank.
    """

    collective: int
    missing: tuple[int, ...]
    expected: tuple[int, ...]
    ranges: NDArray[np.int64]


def joined(parts: Sequence[tuple[int, Losses]]) -> Losses:
    """Return the losses of a vector summed in parts, from pairs of a part's first element and its losses, in order."""
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
        """The losses; set when the sum is done."""

    def end(self, losses: Losses | None, error: Exception | None = None) -> None:
        """Complete the sum, and wake the threads that wait for it. Called by the link only."""
        self.losses = losses
        self.complete(error)


class LossyTransport(ABC):
    """A transport that sums vectors over `num_ranks` ranks; this one is `rank`."""

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
        """Return counts of datagrams: sent, repeated, of strangers, duplicates, replayed, of finished sums, marked."""

    @abstractmethod
    def close(self, timeout_s: float) -> bool:
        """Leave once the peers have all they need from this rank. Return False if `timeout_s` is too short for that."""
