"""What a solver has done so far, and whether it should go on."""

from __future__ import annotations

import time

from paceline.svm.nominations import Nominations
from paceline.svm.problem import Progress, SolverSettings

_LEAST_DECREASE = 1e-14  # of all that the objective has fallen
_PATIENCE = 50  # turns that decrease it by less
_LEAST_TURNS, _TURNS_A_PASS = 10_000, 100  # at which a solver may stop: a fit takes tens


class Tally:
    """Counts, and knows the limits.

    Args:
        settings: Of the solver.
        num_samples: Of the problem.
        num_variables: Of the problem.
        size: Of a working set.

    Attributes:
        num_steps: Pair updates.
        num_turns: Working sets.
        num_settles: Checks of all samples.
        num_reconstructions: How often eliminated samples were brought back.
        least_active: Smallest number of active samples.
        steps_left: Until the limit of pair updates.
    """

    def __init__(self, settings: SolverSettings, num_samples: int, num_variables: int, size: int) -> None:
        self._settings = settings
        self.num_steps = self.num_turns = self.num_settles = self.num_reconstructions = 0
        self.least_active = num_samples
        self.steps_left = settings.step_limit(num_variables)
        self._turn_limit = max(_LEAST_TURNS, _TURNS_A_PASS * num_variables // size)
        self._decrease, self._num_stalled = 0.0, 0
        self._started_s = time.monotonic()

    @property
    def is_exhausted(self) -> bool:
        """Whether a limit is reached."""
        return self.steps_left <= 0 or self.num_turns >= self._turn_limit

    @property
    def is_stalled(self) -> bool:
        """Whether many turns in a row have lowered the objective by no more than rounding."""
        return self._num_stalled >= _PATIENCE

    def turn(self, num_steps: int, decrease: float) -> None:
        """A working set was optimised."""
        self.num_steps += num_steps
        self.steps_left -= num_steps
        self.num_turns += 1
        self._decrease += decrease
        self._num_stalled = 0 if decrease > _LEAST_DECREASE * self._decrease else self._num_stalled + 1

    def settle(self) -> None:
        """All samples are checked now."""
        self.num_settles += 1
        self._num_stalled = 0

    def report(self, nominations: Nominations, is_first_rank: bool) -> None:
        """Tell whoever wants to know."""
        self.least_active = min(self.least_active, nominations.num_active)
        if self._settings.report is not None and is_first_rank:
            elapsed_s = time.monotonic() - self._started_s
            counts = nominations.num_active, nominations.num_support
            self._settings.report(
                Progress(self.num_turns, self.num_steps, nominations.gap, *counts, elapsed_s)
            )
