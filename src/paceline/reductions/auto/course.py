"""The state machine of `compression="auto"`: which codec reduces a step, whether it is timed, and what is exchanged.

The same on every rank, because only agreed numbers go in.

    resuming --resumed--> settled, or measuring    (a state was loaded: the same on all ranks, or not)
    measuring --decided--> settled                 (prediction changes nothing)
        |                   ^   |
        +--decided--> trying    +--checked--> measuring    (steps take longer or shorter; or none is on for long)
                        |  ^    +--checked--> trying       (a codec is on, and its last comparison is long ago)
                        +--+--tried--> settled

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
    num_tried: int = 8  # timed steps of a comparison, half of them with the codec; a multiple of 4
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
                f"{self}: comparisons come less often than they are long, and the drift that is noticed is above 0."
            )


@dataclass(frozen=True)
class Plan:
    """What one step does.

    Attributes:
        codec: Reduces it; None: no compression.
        is_sample: Whether its duration is used.
        question: What is exchanged after its last bucket.
    """

    codec: str | None
    is_sample: bool
    question: Question


class Course:
    """The state: phase, codec in use, and when what is due.

    Args:
        pace: How many steps each phase takes.
        rules: How much a codec has to save.
    """

    def __init__(self, pace: Pace, rules: Rules) -> None:
        self._pace, self._rules = pace, rules
        self.in_use: str | None = None
        self.tried: str | None = None  # the codec that is compared
        self.num_steps = 0
        self._barred_until: dict[str, float] = {}
        self._num_refuted: dict[str, int] = {}
        self._period_s: float | None = None  # duration of a settled step at the first check
        self._check_every = pace.check_every
        self._compared_at = 0
        self._enter(Phase.MEASURING)

    def _enter(self, phase: Phase) -> None:
        self.phase, self._place = phase, 0

    def plan(self) -> Plan:
        """The plan of the next step."""
        place, last = self._place, self._num_samples() + 1
        question = _QUESTIONS[self.phase] if place >= last else Question.NOTHING
        codec = self.in_use
        if self.phase is Phase.TRYING:
            has_codec = place == 0 or (place < last and _PATTERN[(place - 1) % 4])
            codec = self.tried if has_codec else None if self.tried == codec else codec
        return Plan(codec, 0 < place < last, question)

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

    def decided(self, chosen: str | None) -> None:
        """COSTS were exchanged: the prediction chose this codec."""
        if chosen is not None and chosen != self.in_use:
            self._check_every = self._pace.check_every
            self._try(chosen)
            return
        is_news = chosen != self.in_use
        self._check_every = min(self._check_every * (1 if is_news else 2), 8 * self._pace.check_every)
        self.in_use = chosen
        if chosen is None:
            self._compared_at = self.num_steps
        self._settle()

    def tried_out(self, with_s: float, without_s: float) -> bool:
        """PERIODS of a comparison were exchanged; returns whether its codec is on now.

        Args:
            with_s: Duration of steps with the codec.
            without_s: Duration of the other steps: with what was in use before, or with none if that was this codec.
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
        self._settle()
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
        self.tried = self._period_s = None
        self._enter(Phase.SETTLED)

    def _try(self, codec: str) -> None:
        self.tried = codec
        self._enter(Phase.TRYING)
