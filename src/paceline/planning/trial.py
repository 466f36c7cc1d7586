"""The trial of ways to run a step, one after the other: `compression="auto"` and forward overlap decide by it.

    trying      every candidate in turn, and the way without any
    confirming  the best one against what is in use: a change has to be seen twice
    settled     steps are timed in case they become longer or shorter

                          +--- what is in use is the best ---+
                          |                                  v
    start --> trying -----+--- another one is ---> confirming ---> settled
                 ^                                                    |
                 +---- steps take longer or shorter, or long ago -----+

Every rank times its own steps. The ranks exchange medians and keep the maximum of each, so the slowest rank's step
counts. A decision depends on these numbers and on counted steps only, so it is the same on every rank.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from paceline.errors import ConfigurationError
from paceline.given import number

_RAREST_CHECKS = 8  # times as many steps between two checks as at first


@dataclass(frozen=True)
class TrialConfig:
    """The numbers of steps that a trial takes, and the differences that count.

    Attributes:
        gain_ratio: The fraction of a step without a candidate that the candidate has to save.
        num_sweeps: How often each candidate has its turn before a comparison. Turns go there and back, so a linear
            drift cancels.
        turn_steps: Timed steps in a turn.
        warm_up_steps: Steps before them that are not timed, if the turn before was another candidate's.
        check_every: Timed steps between two checks of settled steps. It doubles, up to 8 times this number, with
            each trial that changes nothing.
        try_every: Settled steps after which a new trial begins in any case.
        drift_ratio: How much longer or shorter a settled step has to become for a new trial.
    """

    gain_ratio: float = 0.02
    num_sweeps: int = 8
    turn_steps: int = 1
    warm_up_steps: int = 0
    check_every: int = 25
    try_every: int = 500
    drift_ratio: float = 0.1

    def __post_init__(self) -> None:
        counts = [self.num_sweeps, self.turn_steps, self.check_every, self.try_every]
        is_counted = all(
            number(count) >= 1 and number(count) % 1 == 0
            for count in [*counts, 1 + number(self.warm_up_steps)]
        )
        if not (is_counted and 0 <= number(self.gain_ratio) < 1 and number(self.drift_ratio) > 0):
            raise ConfigurationError(
                f"{self}: numbers of steps have to be positive, gain_ratio less than 1 and drift_ratio more than 0."
            )


class Phase(Enum):
    """The purpose of the current steps."""

    TRYING = "trying"
    CONFIRMING = "confirming"
    SETTLED = "settled"


class StepPlan(NamedTuple):
    """The candidate that one step runs with, or None, and whether the step's duration counts."""

    candidate: str | None
    is_timed: bool


class Trial:
    """The state of a trial: its phase, the candidate in use (None: without any), and the durations so far.

    Contract:
        Local. Every rank makes the same calls, so every rank has the same plan for each step.
    """

    def __init__(self, candidates: Sequence[str], config: TrialConfig) -> None:
        self._candidates, self._config = tuple(candidates), config
        self.in_use: str | None = None
        self.num_steps = 0
        self._check_every = config.check_every
        self._num_sweeps = 0  # so far, of all trials
        self._found: str | None = None  # the candidate that has been the best once, while confirming
        self._settled_at = 0  # steps before it settled
        self._settled_s: float | None = None  # the duration of a settled step at the first check
        self.phase = Phase.TRYING
        self._plans: Sequence[StepPlan] = ()
        self._place = 0  # of the next step in the plans
        self._durations_s: dict[str | None, list[float]] = {}
        self._begin_trying()

    # ---- a step

    @property
    def candidates(self) -> list[str | None]:
        """Return the candidates that the planned steps run with."""
        return list(self._durations_s)

    @property
    def plan(self) -> StepPlan:
        """Return the plan of the next step. If the trial is due, that step runs with what is in use."""
        return StepPlan(self.in_use, is_timed=False) if self.is_due else self._plans[self._place]

    @property
    def is_due(self) -> bool:
        """Return whether the ranks have to exchange their `medians` before a further step is planned."""
        return self._place == len(self._plans)

    def advance(self) -> None:
        """Count a step that ran as planned."""
        self.num_steps += 1
        self._place = min(self._place + 1, len(self._plans))

    def add(self, candidate: str | None, duration_s: float) -> None:
        """Note the duration of a step with this candidate."""
        self._durations_s[candidate].append(duration_s)

    # ---- decisions

    def medians(self) -> list[float]:
        """Return this rank's median durations in seconds, in an order that all ranks share; 0 where it has none."""
        return [statistics.median(durations_s or [0.0]) for durations_s in self._durations_s.values()]

    def decide(self, agreed: Sequence[float]) -> dict[str | None, float]:
        """Decide from the maxima of all ranks' medians, and plan the next steps.

        Returns:
            The duration of a step by candidate, in seconds; empty if some have none, so that they are timed again.
        """
        step_s = dict(zip(self._durations_s, agreed, strict=True))
        if not all(seconds > 0 for seconds in agreed):
            self._plan(self._plans)
            return {}
        if self.phase is Phase.SETTLED:
            self._check(agreed[0])
            return step_s
        best = self._best(step_s)
        if self.phase is Phase.TRYING and best != self.in_use:
            self._found = best
            self._sweep(Phase.CONFIRMING, dict.fromkeys((None, self.in_use, best)))
            return step_s
        if self.phase is Phase.CONFIRMING and best == self._found:
            self.in_use, self._check_every = best, self._config.check_every
        else:
            self._check_every = min(2 * self._check_every, _RAREST_CHECKS * self._config.check_every)
        self._settle()
        return step_s

    def resume(self, candidate: str | None) -> None:
        """Continue with this candidate, which an earlier run has chosen."""
        self.in_use = candidate
        self._settle()

    def _best(self, step_s: dict[str | None, float]) -> str | None:
        enough, best = 1 - self._config.gain_ratio, min(step_s, key=step_s.__getitem__)
        kept = self.in_use if step_s[self.in_use] < enough * step_s[None] else None
        return best if step_s[best] < enough * step_s[kept] else kept

    def _check(self, step_s: float) -> None:
        """Begin a new trial if steps have become longer or shorter since the last one, or if it was long ago."""
        self._settled_s = self._settled_s or step_s
        has_drifted = abs(math.log(step_s / self._settled_s)) > math.log1p(self._config.drift_ratio)
        if has_drifted or self.num_steps - self._settled_at >= self._config.try_every:
            self._begin_trying()
        else:
            self._plan(self._plans)

    # ---- plans

    def _begin_trying(self) -> None:
        self._sweep(Phase.TRYING, dict.fromkeys((None, *self._candidates)))

    def _sweep(self, phase: Phase, candidates: dict[str | None, None]) -> None:
        self.phase, plans = phase, list[StepPlan]()
        for _ in range(self._config.num_sweeps):
            for candidate in reversed(candidates) if self._num_sweeps % 2 else candidates:
                is_new = not plans or plans[-1].candidate != candidate
                plans += [StepPlan(candidate, is_timed=False)] * (is_new * self._config.warm_up_steps)
                plans += [StepPlan(candidate, is_timed=True)] * self._config.turn_steps
            self._num_sweeps += 1
        self._plan(plans)

    def _settle(self) -> None:
        self.phase, self._settled_at = Phase.SETTLED, self.num_steps
        self._settled_s = None
        timed = StepPlan(self.in_use, is_timed=True)
        self._plan([StepPlan(self.in_use, is_timed=False)] + [timed] * self._check_every)

    def _plan(self, plans: Sequence[StepPlan]) -> None:
        self._plans, self._place = plans, 0
        self._durations_s = {plan.candidate: [] for plan in plans}
