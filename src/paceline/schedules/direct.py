"""Direct exchange: each rank reduces one block from all others in one round, then sends the result to all.

Rounds: 1 for each half, 2 for an all-reduce.  Bytes: (P-1)/P n sent per rank and half, in P-1 messages a round.
Each block is accumulated in one place in one round, so a 16-bit message is rounded once without a wider wire.
"""

from __future__ import annotations

from functools import lru_cache

from paceline.schedules.schedule import Rounds, Schedule, Transfer, mirror


def _gather(num_ranks: int) -> Rounds:
    """Each rank serves its successors in turn, so that no rank is everybody's first target."""
    transfers = tuple(
        Transfer(rank, (rank + step) % num_ranks, rank, rank + 1, fold=False)
        for step in range(1, num_ranks)
        for rank in range(num_ranks)
    )
    return (transfers,) if transfers else ()


@lru_cache(maxsize=32)
def all_gather(num_ranks: int) -> Schedule:
    """Rank r's block r reaches every rank."""
    return Schedule("all_gather_direct", num_ranks, num_ranks, _gather(num_ranks))


@lru_cache(maxsize=32)
def reduce_scatter(num_ranks: int) -> Schedule:
    """Rank r ends with block r of the reduction; its other blocks are undefined."""
    return Schedule("reduce_scatter_direct", num_ranks, num_ranks, mirror(_gather(num_ranks)))


@lru_cache(maxsize=32)
def all_reduce(num_ranks: int) -> Schedule:
    """Reduce-scatter, then all-gather."""
    gather = _gather(num_ranks)
    return Schedule("direct", num_ranks, num_ranks, mirror(gather) + gather)
