"""Direct exchange: each rank reduces one block from all others in one round, then sends the result to all.

Rounds: 1 for each half, 2 for an all-reduce.  Bytes: (P-1)/P n sent per rank and half, in P-1 messages a round.
Each block is accumulated in one place in one round, so a 16-bit message is rounded once without a wider wire.
"""

from __future__ import annotations

from paceline.schedules.schedule import Rounds, Transfer, from_gather


def _gather(num_ranks: int) -> Rounds:
    """Each rank serves its successors in turn, so that no rank is everybody's first target."""
    transfers = tuple(
        Transfer(rank, (rank + step) % num_ranks, rank, rank + 1, fold=False)
        for step in range(1, num_ranks)
        for rank in range(num_ranks)
    )
    return (transfers,) if transfers else ()


all_gather, reduce_scatter, all_reduce = from_gather("direct", _gather)
