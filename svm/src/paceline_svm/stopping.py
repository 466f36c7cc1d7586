"""The end of the solver: the optimality check over all samples in double precision, and the limits of its work.

All samples are checked. Double precision is used where single precision could hide a violation: for those that are
nearer to one than `_SAFETY` times the largest deviation seen. Deviations are seen on those near
samples and, against surprises, on samples spread over the rest.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from paceline_svm.communicator import Communicator
from paceline_svm.kernels import expand
from paceline_svm.problem import Active, Problem, Progress, SolverSettings
from paceline_svm.shrinking import ChosenSamples

_SPOT_CHECKS = 64
_SAFETY = 8.0
_DOING = "checking all samples"
_LEAST_DECREASE = 1e-14  # of all that the objective has fallen
_PATIENCE = 50  # working sets in a row that decrease it by less
_LEAST_SETS, _SETS_A_PASS = 10_000, 100  # the limit of working sets; a fit takes tens


class OptimalityCheck:
    """Finds the largest violation over all samples in double precision, and corrects the gradients that it finds wrong.

    Args:
        problem: This rank's part.
        communicator: The ranks.
        chosen: All coefficients that may not be zero, and the samples they belong to.
        tol: Largest violation at the optimum.

    Attributes:
        num_kernel_values: Kernel values that the checks have computed so far.
    """

    def __init__(
        self, problem: Problem, communicator: Communicator, chosen: ChosenSamples, tol: float
    ) -> None:
        self._problem, self._communicator, self._chosen, self._tol = problem, communicator, chosen, tol
        self.num_kernel_values = 0

    def check(self, everyone: Active) -> float:
        """Correct the gradients of the samples that matter; returns the true largest violation. Collective.

        Args:
            everyone: All of this rank's own samples, none shrunk; its `g` is corrected in place.
        """
        num = len(everyone)
        checked = np.zeros(num, np.bool_)
        checked[:: max(1, num // _SPOT_CHECKS)] = True
        deviation = self._correct(everyone, np.flatnonzero(checked))
        may_grow, may_shrink = everyone.beta < everyone.upper, everyone.beta > everyone.lower
        while True:
            least, most, deviation = self.extremes(everyone, deviation)
            margin = self._tol + _SAFETY * deviation
            f = everyone.g + everyone.linear
            near = (may_grow & (f <= least + margin)).any(axis=0)
            near |= (may_shrink & (f >= most - margin)).any(axis=0)
            near &= ~checked
            num_near = int(self._communicator.total(np.array([near.sum()]), _DOING)[0])
            if num_near == 0:
                return most - least
            deviation = max(deviation, self._correct(everyone, np.flatnonzero(near)))
            checked |= near

    def extremes(self, everyone: Active, deviation: float) -> tuple[float, float, float]:
        """Least gradient that may grow, largest that may shrink, largest deviation, over all ranks. Collective."""
        f = everyone.g + everyone.linear
        least = f[everyone.beta < everyone.upper].min(initial=np.inf)
        most = f[everyone.beta > everyone.lower].max(initial=-np.inf)
        extremes = self._communicator.gather(np.array([least, -most, -deviation]), _DOING).min(axis=0)
        least, most, deviation = extremes * [1, -1, -1]
        return float(least), float(most), float(deviation)

    def conclusion(self, everyone: Active) -> tuple[float, float, float]:
        """Offset of the decision function, dual objective and its linear part, of all ranks' samples. Collective."""
        linear = everyone.linear
        f = everyone.g + linear
        free = (everyone.beta > everyone.lower) & (everyone.beta < everyone.upper)
        objective = 0.5 * float((everyone.beta * (f + linear)).sum())
        linear_part = float((everyone.beta * linear).sum())
        total, num, objective, linear_part = self._communicator.total(
            np.array([f[free].sum(), free.sum(), objective, linear_part]), "summing up"
        )
        least, most, _ = self.extremes(everyone, 0.0)
        offset = float(total / num if num else (least + most) / 2)
        return offset, float(objective), float(linear_part)

    def _correct(self, everyone: Active, positions: NDArray[np.int64]) -> float:
        """Compute gradients anew in double precision; returns how far the largest was off."""
        exact = self.exact(positions)
        deviation = float(np.abs(exact - everyone.g[positions]).max(initial=0.0))
        everyone.g[positions] = exact
        return deviation

    def exact(self, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the g of some of this rank's own samples, from all coefficients, in double precision."""
        support = np.flatnonzero(self._chosen.weights)
        self.num_kernel_values += len(support) * len(positions)
        sums = expand(
            self._problem.kernel,
            self._chosen.at(support).astype(np.float64),
            self._chosen.weights[None, support],
            self._problem.samples.take(positions).astype(np.float64),
        )
        return np.asarray(sums[0])


class Tally:
    """Counts what the solver has done, and knows the limits.

    Args:
        settings: Of the solver.
        num_samples: Of the problem.
        num_variables: Of the problem.
        size: Of a working set.

    Attributes:
        num_steps: Pair updates.
        num_working_sets: Working sets.
        num_checks: Checks of all samples.
        num_unshrinks: How often shrunk samples were brought back.
        least_active: Smallest number of active samples.
        steps_left: Until the limit of pair updates.
    """

    def __init__(self, settings: SolverSettings, num_samples: int, num_variables: int, size: int) -> None:
        self._settings = settings
        self.num_steps = self.num_working_sets = self.num_checks = self.num_unshrinks = 0
        self.least_active = num_samples
        self.steps_left = settings.step_limit(num_variables)
        self._set_limit = max(_LEAST_SETS, _SETS_A_PASS * num_variables // size)
        self._decrease, self._num_stalled = 0.0, 0
        self._started_s = time.monotonic()

    @property
    def is_exhausted(self) -> bool:
        """Return whether a limit is reached."""
        return self.steps_left <= 0 or self.num_working_sets >= self._set_limit

    @property
    def is_stalled(self) -> bool:
        """Return whether many working sets in a row have lowered the objective by no more than rounding."""
        return self._num_stalled >= _PATIENCE

    def count_working_set(self, num_steps: int, decrease: float) -> None:
        """Count a working set that was optimised."""
        self.num_steps += num_steps
        self.steps_left -= num_steps
        self.num_working_sets += 1
        self._decrease += decrease
        self._num_stalled = 0 if decrease > _LEAST_DECREASE * self._decrease else self._num_stalled + 1

    def count_check(self) -> None:
        """Count a check of all samples, which is about to begin."""
        self.num_checks += 1
        self._num_stalled = 0

    def report(self, gap: float, num_active: int, num_support: int, is_first_rank: bool) -> None:
        """Pass the progress to `settings.report` on rank 0."""
        self.least_active = min(self.least_active, num_active)
        if self._settings.report is not None and is_first_rank:
            elapsed_s = time.monotonic() - self._started_s
            self._settings.report(
                Progress(self.num_working_sets, self.num_steps, gap, num_active, num_support, elapsed_s)
            )
