"""Recursive doubling: pairs of ranks at distance 1, 2, 4, ... exchange and fold the whole message in every round.

Rounds: log2 P if P is a power of two, else floor(log2 P) + 2: the ranks beyond the largest power of two first send
their message to a partner, and receive the result in the end.
Bytes: n per rank and round. For messages so small that only rounds count.

Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH".
"""

from __future__ import annotations

from functools import lru_cache

from paceline.schedules.schedule import Round, Rounds, Schedule, Transfer, mirror


@lru_cache(maxsize=32)
def all_reduce(num_ranks: int) -> Schedule:
    """Both partners fold the same two values (rule 3 of schedule.py makes the bits equal)."""
    core = 1 << num_ranks.bit_length() - 1
    beyond: Round = tuple(Transfer(rank, rank - core, 0, 1, fold=True) for rank in range(core, num_ranks))
    before: Rounds = (beyond,) if beyond else ()
    doubling = tuple(
        tuple(Transfer(rank, rank ^ 1 << t, 0, 1, fold=True) for rank in range(core))
        for t in range(core.bit_length() - 1)
    )
    return Schedule("recursive_doubling", num_ranks, 1, before + doubling + mirror(before))
