"""The state machine of `compression="auto"`: which codec reduces a step, whether it is timed, and what is exchanged.

The same on every rank, because only agreed numbers go in.

    resuming --resumed--> settled, or measuring    (a state was loaded: the same on all ranks, or not)
    measuring --decided--> settled                 (prediction changes nothing)
        |                   ^   |
        +--decided--> trying    +--checked--> measuring    (steps take longer or shorter; or none is on for long)
                        |  ^    +--checked--> trying       (a codec is on, and its last comparison is long ago)
                        +--+--tried--> trying, then settled    (the best two predicted, one after the other, each
                                                                in more rounds while steps vary too much to tell)

Rules
1. A step's plan depends on the number of synchronized steps that succeeded and on numbers that all ranks share.
2. Measurements are exchanged after a step's last bucket, so they are of the steps before it, and that step itself is
   not timed: it takes longer.
3. Nor is the first step of each phase: buckets are rebuilt after the very first one, and a codec that was just turned
   on allocates its memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from paceline.errors import ConfigurationError
from paceline.planning import Rules

_PATTERN = (False, True, True, False)  # without, with, with, without: a linear drift cancels
_MOST_ROUNDS = 6  # of one comparison
_CLEAR = 2.0  # standard errors between what a codec saves and what it must save


class Phase(Enum):
    """What the current steps are for."""

    RESUMING = "resuming"
    MEASURING = "measuring"
    TRYING = "trying"
    SETTLED = "settled"


class Question(Enum):
    """What the ranks exchange after a step's last bucket."""

    NOTHING = "nothing"
    COSTS = "costs"  # the times of some reductions, measured now, and the profile of the steps before
    PERIODS = "periods"  # the durations of the steps before
    RESUMED = "resumed"  # the codec in the state that was loaded


_QUESTIONS = {
    Phase.RESUMING: Question.RESUMED,
    Phase.MEASURING: Question.COSTS,
    Phase.TRYING: Question.PERIODS,
    Phase.SETTLED: Question.PERIODS,
}


@dataclass(frozen=True)
class Pace:
    """How many steps each phase takes."""

    num_measured: int = 4  # timed steps before a decision
    # Timed steps of a comparison, half of them with the codec; a multiple of 4. If they vary too much to tell, it has
    # up to five more rounds of as many.
    num_tried: int = 8
    # Settled steps between two checks, at first; doubled, up to 8 times, by each that found nothing.
    check_every: int = 25
    # Steps after which a codec that is on is compared again, and after which all is measured again if none is on: a
    # change before the first check of settled steps is not seen as a drift.
    try_every: int = 500
    # By how much the duration of settled steps may change before all is measured again.
    drift_ratio: float = 0.1

    def __post_init__(self) -> None:
        if self.num_measured < 1 or self.num_tried < 4 or self.num_tried % 4 or self.check_every < 3:
            raise ConfigurationError(
                f"{self}: a decision takes 1 measured step or more, a comparison 4, 8, ... steps, and a check comes "
                "every 3 steps at most."
            )
        if self.try_every < self.num_tried or not self.drift_ratio > 0:
            raise ConfigurationError(
                f"Pace: try_every={self.try_every} must be at least num_tried={self.num_tried}, and "
                f"drift_ratio={self.drift_ratio!r} greater than 0."
            )


@dataclass(frozen=True)
class StepPlan:
    """What one step does."""

    codec: str | None  # reduces it; None: no compression
    is_sample: bool  # whether its duration is used
    question: Question  # what is exchanged after its last bucket


class Course:
    """The state: phase, codec in use, and when what is due."""

    def __init__(self, pace: Pace, rules: Rules) -> None:
        self._pace, self._rules = pace, rules
        self.in_use: str | None = None
        self.tried: str | None = None  # the codec that is compared
        self._next_tried: str | None = None  # the one to be compared after it
        self._num_rounds = 1  # of the comparison
        self.num_steps = 0
        self._barred_until: dict[str, float] = {}
        self._num_refuted: dict[str, int] = {}
        self._period_s: float | None = None  # duration of a settled step at the first check
        self._check_every = pace.check_every
        self._compared_at = 0
        self._enter(Phase.MEASURING)

    def _enter(self, phase: Phase) -> None:
        self.phase, self._place = phase, 0

    def plan(self) -> StepPlan:
        """The plan of the next step."""
        place, last = self._place, self._num_samples() + 1
        question = _QUESTIONS[self.phase] if place >= last else Question.NOTHING
        codec = self.in_use
        if self.phase is Phase.TRYING:
            has_codec = place == 0 or (place < last and _PATTERN[(place - 1) % 4])
            codec = self.tried if has_codec else None if self.tried == codec else codec
        return StepPlan(codec, 0 < place < last, question)

    def _num_samples(self) -> int:
        return {
            Phase.RESUMING: -1,
            Phase.MEASURING: self._pace.num_measured,
            Phase.TRYING: self._pace.num_tried,
            Phase.SETTLED: self._check_every - 2,
        }[self.phase]

    def step(self) -> None:
        """A step succeeded; if it exchanged something, the result comes next."""
        self.num_steps += 1
        self._place += 1

    def barred(self) -> frozenset[str]:
        """Codecs whose last comparison refuted their prediction, for a number of steps that doubles each time."""
        return frozenset(name for name, until in self._barred_until.items() if self.num_steps < until)

    def resume(self) -> None:
        """A state was loaded: first exchange whether all ranks have loaded the same."""
        self.in_use = self.tried = None
        self._enter(Phase.RESUMING)

    def resumed(self, codec: str | None, agrees: bool) -> None:
        """RESUMED was exchanged: continue with that codec if all ranks agree, else start from the beginning."""
        self.in_use = codec if agrees else None
        self._compared_at = self.num_steps
        if agrees:
            self._settle()
        else:
            self._enter(Phase.MEASURING)

    def decided(self, chosen: str | None, runner_up: str | None = None) -> None:
        """COSTS were exchanged: the prediction chose this codec, and another to be tried after it."""
        if chosen is not None and chosen != self.in_use:
            self._check_every = self._pace.check_every
            self._try(chosen)
            self._next_tried = runner_up
            return
        is_news = chosen != self.in_use
        self._check_every = min(self._check_every * (1 if is_news else 2), 8 * self._pace.check_every)
        self.in_use = chosen
        if chosen is None:
            self._compared_at = self.num_steps
        self._settle()

    def tries_longer(self, with_s: float, without_s: float, doubt: float) -> bool:
        """PERIODS of a comparison were exchanged; returns whether it has another round, as steps vary too much to tell.

        `doubt` is the standard error of with_s / without_s.
        """
        margin = abs(1 - with_s / without_s - self._rules.off_ratio)
        if margin > _CLEAR * doubt or self._num_rounds == _MOST_ROUNDS:
            return False
        self._num_rounds += 1
        self._enter(Phase.TRYING)
        return True

    def tried_out(self, with_s: float, without_s: float) -> bool:
        """PERIODS of a comparison were exchanged; returns whether its codec is on now.

        The other steps ran with what was in use before, or with none if that was this codec.
        """
        assert self.tried is not None
        self._compared_at = self.num_steps
        saves = 1 - with_s / without_s > self._rules.off_ratio
        if saves:
            self.in_use = self.tried
            self._num_refuted.pop(self.tried, None)
        else:
            self.in_use = None if self.in_use == self.tried else self.in_use
            refuted = self._num_refuted[self.tried] = self._num_refuted.get(self.tried, 0) + 1
            self._barred_until[self.tried] = self.num_steps + self._pace.check_every * 2**refuted
        if self._next_tried is None:
            self._settle()
        else:
            self._try(self._next_tried)
        return saves

    def checked(self, period_s: float) -> None:
        """PERIODS of settled steps were exchanged."""
        before_s, self._period_s = self._period_s, self._period_s or period_s
        has_drifted = before_s is not None and abs(math.log(period_s / before_s)) > math.log1p(
            self._pace.drift_ratio
        )
        expired = [name for name, until in self._barred_until.items() if self.num_steps >= until]
        for name in expired:
            del self._barred_until[name]
        is_due = self.num_steps - self._compared_at >= self._pace.try_every
        is_plain = self.in_use is None and not self._barred_until  # a barred codec is due at its own time
        if has_drifted or expired or (is_due and is_plain):
            self._enter(Phase.MEASURING)
        elif is_due and self.in_use is not None:
            self._try(self.in_use)
        else:
            self._enter(Phase.SETTLED)

    def _settle(self) -> None:
        self.tried = self._next_tried = self._period_s = None
        self._enter(Phase.SETTLED)

    def _try(self, codec: str) -> None:
        self.tried, self._next_tried, self._num_rounds = codec, None, 1
        self._enter(Phase.TRYING)
