"""One rank's part in a schedule: its own messages, round by round, and what else it has to know.

The same for every message size, so it is worked out once. Rounds in which the rank has nothing to do are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from paceline.schedules.schedule import Round, Schedule

HEADER_BYTES = 128
"""Size of the message that says which collective its sender is in. It goes beside a rank's first messages, and
beside the first that a rank receives (`Schedule.introduces`)."""

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Message:
    """What this rank sends to, or receives from, `peer` in one round: blocks `first` to `last` (excluded)."""

    peer: int
    first: int
    last: int
    fold: bool
    partial: bool
    """Whether it carries a partial result (see `Schedule.partial`)."""
    introduces: bool
    """Whether a header goes with it (see `Schedule.introduces`)."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a rank does in one round."""

    settle: tuple[Range, ...]
    """Blocks whose reduction this rank has completed and now sends out: finish them first (average, round)."""
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    fold_later: bool
    """Whether something is folded into blocks that this rank sends in this round: only when those have left."""


@dataclass(frozen=True, slots=True)
class Part:
    """Everything one rank does."""

    turns: tuple[Turn, ...]
    settle: tuple[Range, ...]
    """Blocks to finish in the end, which this rank has completed and not sent out."""
    accumulates: tuple[Range, ...]
    """Blocks that something is folded into, or that leave as partial results."""


@lru_cache(maxsize=64)
def part_of(schedule: Schedule, rank: int) -> Part:
    """What `rank` does in `schedule`."""
    live: set[int] = set()  # folded here, not settled yet, and not given to another rank to fold
    accumulates: set[int] = set()
    turns = []
    for number, transfers in enumerate(schedule.rounds):
        sends, receives = _messages(schedule, number, transfers, rank)
        if not sends and not receives:
            continue
        given = {block for m in sends if m.fold for block in range(m.first, m.last)}
        out = {block for m in sends if not m.fold for block in range(m.first, m.last)}
        folded = {block for m in receives if m.fold for block in range(m.first, m.last)}
        copied = {block for m in receives if not m.fold for block in range(m.first, m.last)}
        turns.append(
            Turn(
                settle=_ranges(out & live),
                sends=sends,
                receives=receives,
                fold_later=bool(folded & (given | out)),
            )
        )
        accumulates |= folded | {b for m in sends if m.partial for b in range(m.first, m.last)}
        live = (live - out - given - copied) | folded
    return Part(tuple(turns), _ranges(live), _ranges(accumulates))


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
