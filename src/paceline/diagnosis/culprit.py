"""The search for the rank that delays the steps, in which phase, and when: always, since a step, or now and then.

Rules, in this order; each asks for 5 % of a step, below which nothing is said
1. One rank has most work in 70 % of the steps, and its median lead is large enough: always, or since an onset.
2. Single steps stand out, by more than the others differ among themselves, and too many of them are one rank's for
   chance. Steps whose phase is proof (a checkpoint, garbage) are looked at first, and alone. A step counts by what it
   costs, so that hiccups of the machine do not outvote a rare and expensive event.
3. Many steps stand out, in one phase, on ranks that change.
Medians, never means: one step of a second would make any rank guilty.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from paceline.diagnosis.step_table import Part, RankStep, StepTable

LEAST_RATIO = 0.05
"""Of a step: a smaller delay is not worth a word."""
FEWEST_STEPS = 12
_MAJORITY = 0.7
_EARLY_RATIO = 0.3  # the lead before an onset over that after it, at most
_BEFORE, _SINCE = 5, 10  # steps before and since an onset, at least
_CHANCE = 0.05  # that so many of the steps that stand out are one rank's
_PROOF = frozenset({"checkpoint", "garbage"})
_COMPUTES = ("forward", "backward")


@dataclass(frozen=True)
class Culprit:
    """The rank that delays the steps."""

    rank: int | None  # None: it changes
    # as `run_records.PHASES`; "other": Python between them; "computation": all of forward and backward
    phase: str
    layer: str  # within backward, if most of the delay is there
    when: str  # "always", "since", "periodic", "at times" or "moving"
    places: tuple[int, ...]  # the column of the culprit in each step of the table
    indices: tuple[int, ...]  # the steps that it delays
    since_step: int | None  # the first one, of an onset
    every: int | None  # the period
    delay_s: float  # by how much it delays such a step, in the median
    excess_s: dict[Part, float]  # by part, how much longer than the others it works, in the median
    sureness: float  # the share of the steps looked at in which this rank was last


def find_culprit(table: StepTable) -> Culprit | None:
    """Return the rank that delays the steps; None if none does enough. Needs two ranks and a dozen steps."""
    if len(table) < FEWEST_STEPS or len(table.ranks) < 2:
        return None
    seen = _Seen(table)
    return seen.constant() or seen.now_and_then()


class _Seen:
    """The delays of each step of a table: by how much the last rank is behind the others."""

    def __init__(self, table: StepTable) -> None:
        self.table = table
        self.step_s = table.step_s
        self.leads_s = table.leads_s()
        self.late = [max(range(len(row)), key=row.__getitem__) for row in self.leads_s]

    def constant(self) -> Culprit | None:
        """Return the culprit that delays all steps (rule 1)."""
        likely = [Counter(x).most_common(1)[0][0] for x in (self.late[-FEWEST_STEPS:], self.late)]
        found = (self._of_rank(place) for place in dict.fromkeys(likely))
        return next((culprit for culprit in found if culprit is not None), None)

    def _of_rank(self, place: int) -> Culprit | None:
        count = self.late.count(place)
        mine = [leads[place] for leads in self.leads_s]
        onset = self._onset(mine)
        if onset is not None:
            of_late = self.late[onset:]
            count, mine = of_late.count(place), mine[onset:]
        num_steps = len(mine)
        if count < _MAJORITY * num_steps or median(mine) < LEAST_RATIO * self.step_s:
            return None
        first = len(self.late) - num_steps
        indices = [i for i in range(first, len(self.late)) if self.late[i] == place]
        if onset is None:
            return self._describe(place, indices, "always", count / num_steps)
        since = self.table.steps[onset]
        return self._describe(place, indices, "since", count / num_steps, since_step=since)

    def _onset(self, leads_s: Sequence[float]) -> int | None:
        """Return the step at which a delay begins that was not there before; None: no step is such."""
        places = range(_BEFORE, len(leads_s) - _SINCE + 1)
        if not places:
            return None
        at = min(places, key=lambda i: _scatter_s(leads_s[:i]) + _scatter_s(leads_s[i:]))
        before_s, after_s = median(leads_s[:at]), median(leads_s[at:])
        return at if after_s > LEAST_RATIO * self.step_s and before_s < _EARLY_RATIO * after_s else None

    def now_and_then(self) -> Culprit | None:
        """Return the culprit that delays some steps (rules 2 and 3)."""
        table = self.table
        bar_s = max(2 * LEAST_RATIO * self.step_s, 1.5 * median(map(_spread_s, table.rows)))
        stand_out = [i for i, place in enumerate(self.late) if self.leads_s[i][place] > bar_s]
        phases = {i: _largest(phases_of(table.excess_s(i, self.late[i]))) for i in stand_out}
        proven = [i for i in stand_out if phases[i] in _PROOF]
        return (
            self._events(proven, phases, is_proven=True)
            or self._events(stand_out, phases, is_proven=False)
            or self._moving(stand_out, phases)
        )

    def _costs_s(self, indices: Sequence[int], of: Callable[[int], Hashable]) -> list[tuple[Any, float]]:
        found: dict[Hashable, float] = {}
        for i in indices:
            found[of(i)] = found.get(of(i), 0.0) + self.leads_s[i][self.late[i]]
        return sorted(found.items(), key=lambda item: -item[1])

    def _is_worth_a_word(self, indices: Sequence[int]) -> bool:
        lost_s = sum(self.leads_s[i][self.late[i]] for i in indices)
        return len(indices) >= 2 and lost_s >= LEAST_RATIO * sum(self.table.steps_s)

    def _events(self, indices: Sequence[int], phases: dict[int, str], *, is_proven: bool) -> Culprit | None:
        """Return one rank's delays among these steps. Unless proven, they are of one phase, and too many for chance."""
        if not self._is_worth_a_word(indices):
            return None
        place, cost_s = self._costs_s(indices, self.late.__getitem__)[0]
        _, same_s = self._costs_s(indices, phases.__getitem__)[0]
        total_s = sum(seconds for _, seconds in self._costs_s(indices, self.late.__getitem__))
        mine = [i for i in indices if self.late[i] == place]
        is_no_chance = is_proven or _chance(len(mine), len(indices), len(self.table.ranks)) < _CHANCE
        if len(mine) < 2 or cost_s < _MAJORITY * total_s or same_s < total_s / 2 or not is_no_chance:
            return None
        every = _period(mine)
        return self._describe(place, mine, "periodic" if every else "at times", cost_s / total_s, every=every)

    def _moving(self, indices: Sequence[int], phases: dict[int, str]) -> Culprit | None:
        """Return the culprit of delays that move from rank to rank (rule 3)."""
        if not self._is_worth_a_word(indices):
            return None
        phase, same_s = self._costs_s(indices, phases.__getitem__)[0]
        total_s = sum(seconds for _, seconds in self._costs_s(indices, phases.__getitem__))
        is_spread = len({self.late[i] for i in indices}) >= 0.6 * len(self.table.ranks)
        if same_s < _MAJORITY * total_s or len(indices) < 0.4 * len(self.table) or not is_spread:
            return None
        return self._describe(None, indices, "moving", same_s / total_s, phase=phase)

    def _describe(
        self,
        place: int | None,
        indices: Sequence[int],
        when: str,
        sureness: float,
        phase: str = "",
        since_step: int | None = None,
        every: int | None = None,
    ) -> Culprit:
        table = self.table
        places = tuple(self.late if place is None else [place] * len(self.late))
        each = [table.excess_s(i, places[i]) for i in indices]
        excess_s = {part: median(x.get(part, 0.0) for x in each) for part in set().union(*each)}
        by_phase = phases_of(excess_s)
        phase = phase or _largest(by_phase)
        layer = _layer(excess_s, phase) if phase == "backward" else ""
        positive_s = sum(x for x in by_phase.values() if x > 0) or 1.0
        both = [by_phase.get(x, 0.0) > 0.12 * positive_s for x in _COMPUTES]
        if phase in _COMPUTES and not layer and all(both) and by_phase[phase] < 0.85 * positive_s:
            phase = "computation"
        return Culprit(
            None if place is None else table.ranks[place],
            phase,
            layer,
            when,
            places,
            tuple(indices),
            since_step,
            every,
            median(self.leads_s[i][places[i]] for i in indices),
            excess_s,
            sureness,
        )


def _scatter_s(values_s: Sequence[float]) -> float:
    """Sum the distances from the median. Their least sum, before and after a step, places an onset exactly."""
    middle_s = median(values_s)
    return sum(abs(value_s - middle_s) for value_s in values_s)


def _spread_s(row: Sequence[RankStep]) -> float:
    works = sorted(rank.work_s for rank in row)
    return works[-2] - works[0]


def phases_of(excess_s: dict[Part, float]) -> dict[str, float]:
    """Return the seconds of each phase, summed over its layers."""
    found: dict[str, float] = {}
    for (phase, _), seconds in excess_s.items():
        found[phase] = found.get(phase, 0.0) + seconds
    return found


def _largest(by_phase: dict[str, float]) -> str:
    return max(by_phase, key=by_phase.__getitem__)


def _layer(excess_s: dict[Part, float], phase: str) -> str:
    layers = {layer: seconds for (name, layer), seconds in excess_s.items() if name == phase}
    layer = max(layers, key=layers.__getitem__)
    return layer if layers[layer] >= 0.5 * sum(layers.values()) else ""


def _chance(num_own: int, num_all: int, num_ranks: int) -> float:
    of_one = 1 / num_ranks
    tail = sum(
        math.comb(num_all, k) * of_one**k * (1 - of_one) ** (num_all - k) for k in range(num_own, num_all + 1)
    )
    return min(1.0, num_ranks * tail)


def _period(indices: Sequence[int]) -> int | None:
    """Return the distance of at least three events if it is constant and more than one step."""
    gaps = {b - a for a, b in pairwise(indices)}
    return gaps.pop() if len(indices) >= 3 and len(gaps) == 1 and 1 not in gaps else None
