"""Circulant (Bruck) algorithm: halving and doubling for any number of ranks, by distances 1, 2, 4, ... around a circle.

Rounds: ceil(log2 P) for each half, 2 ceil(log2 P) for an all-reduce.  Bytes: (P-1)/P n sent per rank and half.
As many rounds as halving-doubling with binary blocks and never more bytes, but its large messages go far:
where ranks next to each other share a host, halving-doubling sends less between hosts.

Source: Bruck et al. 1997, "Efficient algorithms for all-to-all communications", section on concatenation; its
mirror image as a reduce-scatter: Traff 2024, "Optimal, non-pipelined reduce-scatter and allreduce algorithms".
Blocks stay where they are in the message, so a range that passes the end travels as two messages.
"""

from __future__ import annotations

from paceline.schedules.schedule import Rounds, Transfer, from_gather


def _gather(num_ranks: int) -> Rounds:
    """Before each round rank r holds blocks r to r+held-1 (around the circle); they go to rank r-held."""
    rounds = []
    held = 1
    while held < num_ranks:
        sent = min(held, num_ranks - held)
        rounds.append(
            tuple(
                Transfer(rank, (rank - held) % num_ranks, first, last, fold=False)
                for rank in range(num_ranks)
                for first, last in _around(rank, sent, num_ranks)
            )
        )
        held += sent
    return tuple(rounds)


def _around(first: int, count: int, size: int) -> list[tuple[int, int]]:
    """Blocks first to first+count-1 modulo `size`, as one or two ranges."""
    last = first + count
    if last <= size:
        return [(first, last)]
    return [(first, size), (0, last - size)]


all_gather, reduce_scatter, all_reduce = from_gather("circulant", _gather)
