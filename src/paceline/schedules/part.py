"""One rank's part of a schedule: what it sends, receives and finalizes, round by round.

It is the same for every message size, so it is computed once. Rounds in which the rank has nothing to do are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from paceline.schedules.schedule import Round, Schedule

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Message:
    """Blocks `first` to `last` (excluded) that this rank sends to `peer`, or receives from it, in one round."""

    peer: int
    first: int
    last: int
    fold: bool
    partial: bool
    """Whether it carries a partial result (see `Schedule.partial`)."""
    introduces: bool
    """Whether a header is sent with it (see `Schedule.introduces`)."""


@dataclass(frozen=True, slots=True)
class RankRound:
    """One rank's part of one round."""

    finalize: tuple[Range, ...]
    """Blocks whose reduction this rank has completed and now sends out: to be averaged and rounded before."""
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    fold_later: bool
    """Whether something is folded into blocks that this rank sends in this round: only when those have left."""


@dataclass(frozen=True, slots=True)
class Part:
    """Everything one rank does."""

    rounds: tuple[RankRound, ...]
    finalize: tuple[Range, ...]
    """Blocks to average and round in the end: this rank has completed them and not sent them out."""
    accumulates: tuple[Range, ...]
    """Blocks that something is folded into, or that leave as partial results."""


@lru_cache(maxsize=64)
def part_of(schedule: Schedule, rank: int) -> Part:
    """Return the part of `rank` in `schedule`."""
    live: set[int] = set()  # folded here, not finalized yet, and not sent to another rank to be folded there
    accumulates: set[int] = set()
    rounds = []
    for number, transfers in enumerate(schedule.rounds):
        sends, receives = _messages(schedule, number, transfers, rank)
        if not sends and not receives:
            continue
        given = {block for m in sends if m.fold for block in range(m.first, m.last)}
        out = {block for m in sends if not m.fold for block in range(m.first, m.last)}
        folded = {block for m in receives if m.fold for block in range(m.first, m.last)}
        copied = {block for m in receives if not m.fold for block in range(m.first, m.last)}
        rounds.append(
            RankRound(
                finalize=_ranges(out & live),
                sends=sends,
                receives=receives,
                fold_later=bool(folded & (given | out)),
            )
        )
        accumulates |= folded | {b for m in sends if m.partial for b in range(m.first, m.last)}
        live = (live - out - given - copied) | folded
    return Part(tuple(rounds), _ranges(live), _ranges(accumulates))


def _messages(
    schedule: Schedule, number: int, transfers: Round, rank: int
) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    sends, receives = [], []
    marks = zip(transfers, schedule.partial[number], schedule.introduces[number], strict=True)
    for t, partial, introduces in marks:
        if rank == t.source:
            sends.append(Message(t.target, t.first, t.last, t.fold, partial, introduces))
        elif rank == t.target:
            receives.append(Message(t.source, t.first, t.last, t.fold, partial, introduces))
    return tuple(sends), tuple(receives)


def _ranges(blocks: Iterable[int]) -> tuple[Range, ...]:
    """Blocks as maximal ranges, in order."""
    ranges: list[Range] = []
    for block in sorted(blocks):
        if ranges and ranges[-1][1] == block:
            ranges[-1] = (ranges[-1][0], block + 1)
        else:
            ranges.append((block, block + 1))
    return tuple(ranges)
