"""Making rounds out of rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest

from paceline.schedules.schedule import Round, Transfer

Rounds = tuple[Round, ...]


def mirror(rounds: Iterable[Round]) -> Rounds:
    """Run backwards: the last round first, targets send to sources, and what overwrote is folded (or vice versa).

    The copies of a block spread from its owner along a tree. Backwards, every rank's contribution follows the
    same tree to the owner: an all-gather becomes a reduce-scatter, a broadcast a reduce, at the same cost.
    """
    return tuple(
        tuple(replace(t, source=t.target, target=t.source, fold=not t.fold) for t in transfers)
        for transfers in reversed(tuple(rounds))
    )


def place(rounds: Iterable[Round], ranks: Sequence[int], first_block: int) -> Rounds:
    """Let `ranks` play ranks 0, 1, ... of `rounds`, on the blocks from `first_block` on."""
    return tuple(
        tuple(
            Transfer(
                source=ranks[t.source],
                target=ranks[t.target],
                first=first_block + t.first,
                last=first_block + t.last,
                fold=t.fold,
            )
            for t in transfers
        )
        for transfers in rounds
    )


def side_by_side(parts: Iterable[Rounds]) -> Rounds:
    """The first rounds of all `parts` as one round, then the second ones, ..."""
    return tuple(
        tuple(transfer for transfers in together for transfer in transfers)
        for together in zip_longest(*parts, fillvalue=())
    )
