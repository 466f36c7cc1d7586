"""The short algorithms: ranks are numbered 0 to P - 1, and every rank plays the same part whatever host it is on.

`n` is the length of the message. Rounds and bytes of each:

    direct              1 round for each half; (P-1)/P n per rank and half, in P-1 messages per round
    ring                P-1 rounds for each half; (P-1)/P n per rank and half
    circulant           ceil(log2 P) rounds for each half; (P-1)/P n per rank and half
    recursive doubling  log2 P rounds, or floor(log2 P) + 2 if P is no power of two; n per rank and round

An all-reduce of the first three is a reduce-scatter and then an all-gather, its two halves.
"""

from __future__ import annotations

from functools import lru_cache

from paceline.schedules.schedule import Round, Rounds, Schedule, Transfer, from_gather, mirror


def _direct(num_ranks: int) -> Rounds:
    """Send each rank's block to all other ranks in one round.

    Each rank serves its successors in turn. Otherwise rank 0 would be the first target of all ranks. Each block is
    folded in one place in one round, so a 16-bit message is rounded once.
    """
    transfers = tuple(
        Transfer(rank, (rank + step) % num_ranks, rank, rank + 1, fold=False)
        for step in range(1, num_ranks)
        for rank in range(num_ranks)
    )
    return (transfers,) if transfers else ()


def _ring(num_ranks: int) -> Rounds:
    """Pass block r-t from rank r to its successor in round t; rank r received it in the round before.

    If ranks of a host are neighbours, every host's link carries each block once in each direction.

    Source:
        Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms". Uneven blocks are cut, not padded.
    """
    return tuple(
        tuple(
            Transfer(
                rank, (rank + 1) % num_ranks, (rank - t) % num_ranks, (rank - t) % num_ranks + 1, fold=False
            )
            for rank in range(num_ranks)
        )
        for t in range(num_ranks - 1)
    )


def _circulant(num_ranks: int) -> Rounds:
    """Double the blocks that each rank holds in every round, by sending them over distances 1, 2, 4, ... on a circle.

    Before a round rank r holds blocks r to r+held-1; they go to rank r-held. Blocks stay where they are in the message,
    so a range that passes the end travels as two messages. There are as many rounds as in halving-doubling with binary
    blocks, and never more bytes, but large messages go far. Where ranks next to each other share a host,
    halving-doubling sends less between hosts.

    Source:
        Bruck et al. 1997, "Efficient algorithms for all-to-all communications", section on concatenation. Its mirror
        image as a reduce-scatter: Traff 2024, "Optimal, non-pipelined reduce-scatter and allreduce algorithms".
    """
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
    last = first + count
    if last <= size:
        return [(first, last)]
    return [(first, size), (0, last - size)]


direct = from_gather("direct", _direct)
ring = from_gather("ring", _ring)
circulant = from_gather("circulant", _circulant)


@lru_cache(maxsize=32)
def recursive_doubling(num_ranks: int) -> Schedule:
    """Return an all-reduce in which pairs at distance 1, 2, 4, ... exchange and fold the whole message in every round.

    Ranks beyond the largest power of two first send their message to a partner, and receive the result in the end.
    Both partners fold the same two values (rule 3 of schedule.py makes the bits equal). For messages so small that only
    rounds count.

    Source:
        Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH".
    """
    core = 1 << num_ranks.bit_length() - 1
    beyond: Round = tuple(Transfer(rank, rank - core, 0, 1, fold=True) for rank in range(core, num_ranks))
    before: Rounds = (beyond,) if beyond else ()
    doubling = tuple(
        tuple(Transfer(rank, rank ^ 1 << t, 0, 1, fold=True) for rank in range(core))
        for t in range(core.bit_length() - 1)
    )
    return Schedule("recursive_doubling", num_ranks, 1, before + doubling + mirror(before))
