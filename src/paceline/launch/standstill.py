"""Who waits for whom: decided from what each rank has entered, without looking at any process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from paceline.observe.progress import Entered


@dataclass(frozen=True)
class Standstill:
    """Ranks that wait for others, and for whom."""

    waiting: tuple[Entered, ...]  # where each is that waits
    # ranks that are in no collective, while others wait for them; empty: everybody waits
    missing: tuple[int, ...]
    since_s: float  # when the last of them entered or left a collective
    starting: bool = False  # whether one of them has not entered any collective yet

    @property
    def who(self) -> tuple[object, ...]:
        """Equal for two looks at one standstill, but for times."""
        return self.missing, tuple((each.rank, each.group, each.count) for each in self.waiting)

    @property
    def known_s(self) -> float:
        """Until when it is known that they wait; infinite if all are on this machine."""
        return min(each.known_s for each in self.waiting)

    @property
    def differs(self) -> bool:
        """Return whether those that wait are in different collectives."""
        return len({(each.group, each.count, each.what) for each in self.waiting}) > 1


def standstill(entered: Iterable[Entered], num_ranks: int) -> Standstill | None:
    """Who waits for whom; None: nobody. `num_ranks`: of the job, if all are here, to miss silent ones; or 0."""
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
    """Nobody is seen to wait: whether some have launched a collective that others have not."""
    return any(each.count < furthest for each in group)


class StepLengths:
    """How long steps are, as the ranks count them."""

    def __init__(self) -> None:
        self._step = -1
        self._since_s = 0.0
        self._lengths_s: deque[float] = deque(maxlen=20)

    def note(self, entered: Iterable[Entered], now_s: float) -> None:
        """Note how far they are now."""
        step = max((each.step for each in entered), default=-1)
        if step > self._step:
            if self._step >= 0:
                self._lengths_s.append((now_s - self._since_s) / (step - self._step))
            self._step, self._since_s = step, now_s

    @property
    def usual_s(self) -> float:
        return median(self._lengths_s) if self._lengths_s else 0.0
