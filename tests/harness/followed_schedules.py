"""Schedules followed symbolically, for their tests, and the topologies that they are tested over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from paceline.schedules import Schedule, Topology

Expression = Any
"""A rank's contribution, which is its number, or a pair of expressions that were folded."""


def topologies(num_ranks: int) -> Iterator[Topology]:
    """Yield one host; one rank a host; neighbours, every other rank, and as unequal as possible."""
    yield Topology.one_host(num_ranks)
    if num_ranks > 1:
        yield Topology.one_rank_a_host(num_ranks)
        yield Topology(tuple(rank * 2 // num_ranks for rank in range(num_ranks)))
        yield Topology((0, *[1] * (num_ranks - 1)))
    if num_ranks > 3:
        yield Topology(tuple(rank % 2 for rank in range(num_ranks)))
        yield Topology(tuple(rank * 3 // num_ranks for rank in range(num_ranks)))


def check_rules(schedule: Schedule) -> None:
    """Check that each transfer is between two ranks, and that rules 4 and 5 of `schedules/schedule.py` hold."""
    ranks, final = range(schedule.num_ranks), set[tuple[int, int]]()
    for number, transfers in enumerate(schedule.rounds):
        overwritten: Counter[tuple[int, int]] = Counter()
        touched: set[tuple[int, int]] = set()
        for t in transfers:
            where = f"{schedule.name}, round {number}: {t}"
            assert t.source in ranks, f"{where}: no such rank"
            assert t.target in ranks, f"{where}: no such rank"
            assert t.source != t.target, f"{where}: sends to itself"
            assert 0 <= t.first < t.last <= schedule.num_blocks, f"{where}: no such blocks"
            for block in range(t.first, t.last):
                source, target = (t.source, block), (t.target, block)
                assert not (t.fold and {source, target} & final), (
                    f"{where}: folds final block {block} (rule 4)"
                )
                touched |= {source, target} if t.fold else {source}
                overwritten[target] += not t.fold
        for place, times in overwritten.items():
            assert times < 2, f"{schedule.name}, round {number}: overwrites {place} twice (rule 5)"
            assert not (times and place in touched), f"{schedule.name}, round {number}: uses {place} (rule 5)"
        final |= {
            (rank, block)
            for t in transfers
            if not t.fold
            for rank in (t.source, t.target)
            for block in range(t.first, t.last)
        }


def follow(schedule: Schedule) -> list[list[Expression]]:
    """Return every rank's blocks after the schedule, as expressions, if it keeps the rules."""
    check_rules(schedule)
    held: list[list[Expression]] = [[rank] * schedule.num_blocks for rank in range(schedule.num_ranks)]
    for transfers in schedule.rounds:
        before = [list(blocks) for blocks in held]
        for t in transfers:
            for block in range(t.first, t.last):
                sent, own = before[t.source][block], held[t.target][block]
                folded = (sent, own) if t.source < t.target else (own, sent)
                held[t.target][block] = folded if t.fold else sent
    return held


def contributions(expression: Expression) -> list[int]:
    """Return the ranks in an expression, with repetitions, in ascending order."""
    if isinstance(expression, int):
        return [expression]
    return sorted(contributions(expression[0]) + contributions(expression[1]))
