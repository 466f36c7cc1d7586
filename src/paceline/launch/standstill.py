"""Decides which ranks wait for which, from the collectives that each has entered. Looks at no process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from paceline.observe.progress import Entered


@dataclass(frozen=True)
class Standstill:
    """Ranks that wait, and the ranks that they wait for."""

    waiting: tuple[Entered, ...]  # the position of each rank that waits
    # ranks that are in no collective while others wait for them; empty: all ranks wait
    missing: tuple[int, ...]
    since_s: float  # when the last of them entered or left a collective
    starting: bool = False  # whether one of them has not entered any collective yet

    @property
    def who(self) -> tuple[object, ...]:
        """Equal for two looks at one standstill, but for times."""
        return self.missing, tuple((each.rank, each.group, each.count) for each in self.waiting)

    @property
    def known_s(self) -> float:
        """The time until which they are known to wait; infinite if all are on this machine."""
        return min(each.known_s for each in self.waiting)

    @property
    def differs(self) -> bool:
        """Return whether those that wait are in different collectives."""
        return len({(each.group, each.count, each.what) for each in self.waiting}) > 1


def standstill(entered: Iterable[Entered], num_ranks: int) -> Standstill | None:
    """Return which ranks wait for which; None if no rank waits.

    `num_ranks` is the job's if all ranks are here, so that silent ones count as missing; else 0.
    """
    by_group: dict[bytes, list[Entered]] = {}
    for each in entered:
        by_group.setdefault(each.group, []).append(each)
    here = set(range(num_ranks)) or {each.rank for group in by_group.values() for each in group}
    waiting: dict[int, Entered] = {}
    missing: set[int] = set()
    for group in by_group.values():
        furthest = max(each.count for each in group)
        inside = [each for each in group if each.waits] or [
            each for each in group if each.count == furthest and _lags(group, furthest)
        ]
        waiting |= {each.rank: each for each in inside}
        if inside:
            count_of = {each.rank: each.count for each in group}
            members = set(group[0].ranks) & here or set(count_of)
            is_behind = {rank for rank in members if count_of.get(rank, 0) < max(x.count for x in inside)}
            missing |= is_behind - {each.rank for each in inside}
    if not waiting:
        return None
    missing -= set(waiting)
    last_s = max(
        each.at_s for group in by_group.values() for each in group if each.rank in missing | set(waiting)
    )
    known = {each.rank for group in by_group.values() for each in group}
    return Standstill(
        tuple(waiting[rank] for rank in sorted(waiting)),
        tuple(sorted(missing)),
        last_s,
        bool(missing - known),
    )


def _lags(group: Sequence[Entered], furthest: int) -> bool:
    """Return whether some ranks have launched a collective that others have not, where none is seen to wait."""
    return any(each.count < furthest for each in group)


class StepLengths:
    """The lengths of the last steps, as the ranks count them."""

    def __init__(self) -> None:
        self._step = -1
        self._since_s = 0.0
        self._lengths_s: deque[float] = deque(maxlen=20)

    def note(self, entered: Iterable[Entered], now_s: float) -> None:
        """Note the step at which the ranks are now."""
        step = max((each.step for each in entered), default=-1)
        if step > self._step:
            if self._step >= 0:
                self._lengths_s.append((now_s - self._since_s) / (step - self._step))
            self._step, self._since_s = step, now_s

    @property
    def usual_s(self) -> float:
        return median(self._lengths_s) if self._lengths_s else 0.0
