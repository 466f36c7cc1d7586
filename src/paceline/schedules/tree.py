"""Binomial tree, for broadcast and reduce: in each round every rank that has the message sends it to one that has not.

Rounds: ceil(log2 P).  Bytes: n per message; the root sends ceil(log2 P) of them, P-1 are sent in all.
"""

from __future__ import annotations

from functools import lru_cache

from paceline.errors import ConfigurationError
from paceline.schedules.schedule import Rounds, Schedule, Transfer, mirror


def _spread(num_ranks: int, root: int) -> Rounds:
    """Ranks are counted from the root; those below 2^t serve those 2^t further."""
    if not 0 <= root < num_ranks:
        raise ConfigurationError(f"root is rank {root}; there are ranks 0 to {num_ranks - 1}")
    return tuple(
        tuple(
            Transfer((root + i) % num_ranks, (root + i + reach) % num_ranks, 0, 1, fold=False)
            for i in range(min(reach, num_ranks - reach))
        )
        for reach in (1 << t for t in range((num_ranks - 1).bit_length()))
    )


@lru_cache(maxsize=32)
def broadcast(num_ranks: int, root: int = 0) -> Schedule:
    """The root's message reaches every rank."""
    return Schedule("broadcast_tree", num_ranks, 1, _spread(num_ranks, root))


@lru_cache(maxsize=32)
def reduce(num_ranks: int, root: int = 0) -> Schedule:
    """The root ends with the reduction; the other ranks' buffers are undefined."""
    return Schedule("reduce_tree", num_ranks, 1, mirror(_spread(num_ranks, root)))
