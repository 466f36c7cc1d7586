"""Ring: in every round each rank sends one block to its successor and receives one from its predecessor.

Rounds: P-1 for each half, 2(P-1) for an all-reduce.  Bytes: (P-1)/P n sent per rank and half.
Every host's link carries each block once in each direction if ranks of a host are neighbours.

Source: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms". Uneven blocks are cut, not padded.
"""

from __future__ import annotations

from paceline.schedules.schedule import Rounds, Transfer, from_gather


def _gather(num_ranks: int) -> Rounds:
    """Round t: rank r passes on block r-t, which it received the round before."""
    return tuple(
        tuple(
            Transfer(
                rank, (rank + 1) % num_ranks, (rank - t) % num_ranks, (rank - t) % num_ranks + 1, fold=False
            )
            for rank in range(num_ranks)
        )
        for t in range(num_ranks - 1)
    )


all_gather, reduce_scatter, all_reduce = from_gather("ring", _gather)
