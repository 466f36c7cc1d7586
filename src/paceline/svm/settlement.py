"""Is it the optimum? The largest violation over all samples, in double precision.

All samples are looked at, but only those are computed in double precision that are so near to a violation that single
precision could hide one: nearer than `_SAFETY` times the largest deviation seen. Deviations are seen on those near
samples and, against surprises, on samples spread over the rest.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.svm.active import Active
from paceline.svm.expansion import expand
from paceline.svm.problem import Problem
from paceline.svm.seen import Seen
from paceline.svm.world import World

_SPOT_CHECKS = 64
_SAFETY = 8.0
_DOING = "checking all samples"


class Settlement:
    """Checks, and corrects what it finds wrong.

    Args:
        problem: This rank's part.
        world: The ranks.
        seen: Coefficients and samples behind them.
        tol: Largest violation at the optimum.

    Attributes:
        num_kernel_values: What the checks have cost so far.
    """

    def __init__(self, problem: Problem, world: World, seen: Seen, tol: float) -> None:
        self._problem, self._world, self._seen, self._tol = problem, world, seen, tol
        self.num_kernel_values = 0

    def check(self, everyone: Active) -> float:
        """Correct the gradients of the samples that matter; returns the true largest violation. Collective.

        Args:
            everyone: All of this rank's own samples, none eliminated; its `g` is corrected in place.
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
            num_near = int(self._world.total(np.array([near.sum()]), _DOING)[0])
            if num_near == 0:
                return most - least
            deviation = max(deviation, self._correct(everyone, np.flatnonzero(near)))
            checked |= near

    def extremes(self, everyone: Active, deviation: float) -> tuple[float, float, float]:
        """Least gradient that may grow, largest that may shrink, largest deviation, of all ranks. Collective."""
        f = everyone.g + everyone.linear
        least = f[everyone.beta < everyone.upper].min(initial=np.inf)
        most = f[everyone.beta > everyone.lower].max(initial=-np.inf)
        least, most, deviation = self._world.gather(np.array([least, -most, -deviation]), _DOING).min(
            axis=0
        ) * [1, -1, -1]
        return float(least), float(most), float(deviation)

    def conclusion(self, everyone: Active) -> tuple[float, float]:
        """Offset of the decision function, and dual objective, of all ranks' samples. Collective."""
        linear = self._problem.linear
        f = everyone.g + linear
        free = (everyone.beta > everyone.lower) & (everyone.beta < everyone.upper)
        objective = 0.5 * float((everyone.beta * (f + linear)).sum())
        total, num, objective = self._world.total(
            np.array([f[free].sum(), free.sum(), objective]), "summing up"
        )
        least, most, _ = self.extremes(everyone, 0.0)
        return float(total / num if num else (least + most) / 2), float(objective)

    def _correct(self, everyone: Active, positions: NDArray[np.int64]) -> float:
        """Compute gradients anew in double precision; returns how far the largest was off."""
        exact = self.exact(positions)
        deviation = float(np.abs(exact - everyone.g[positions]).max(initial=0.0))
        everyone.g[positions] = exact
        return deviation

    def exact(self, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        """The g of some of this rank's own samples, from all coefficients, in double precision."""
        support = np.flatnonzero(self._seen.weights)
        self.num_kernel_values += len(support) * len(positions)
        sums = expand(
            self._problem.kernel,
            self._seen.at(support).astype(np.float64),
            self._seen.weights[None, support],
            self._problem.samples.take(positions).astype(np.float64),
        )
        return np.asarray(sums[0])
