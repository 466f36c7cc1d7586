"""Which samples are eliminated, and how their gradients are made right again.

Rules
1. An eliminated sample goes home: to the rank that brought it. Its g is that of the moment it left.
2. Samples that left together form a group with one reference: the coefficients of that moment. Coming back, a group's g
   grows by the kernel values times what the coefficients have changed since then, no more and no less: groups that left
   at different times have different references.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.svm.active import Active
from paceline.svm.expansion import expand
from paceline.svm.nominations import Nominations
from paceline.svm.problem import Problem
from paceline.svm.samples import Samples
from paceline.svm.seen import Seen
from paceline.svm.world import World

_IMBALANCE, _IMBALANCE_SAMPLES = 1.25, 64


@dataclass(frozen=True)
class Group:
    """Samples that left together.

    Attributes:
        positions: Among the rank's own.
        reference: `Seen.weights` when they left.
    """

    positions: NDArray[np.int64]
    reference: NDArray[np.float64]


class Away:
    """A rank's own samples, while some are eliminated or with other ranks.

    Args:
        problem: This rank's part.
        world: The ranks.
        seen: Coefficients and samples behind them.

    Attributes:
        has_moved: Whether active samples may be with ranks that did not bring them.
        num_kernel_values: What coming back has cost so far.
    """

    def __init__(self, problem: Problem, world: World, seen: Seen) -> None:
        self._problem, self._world, self._seen = problem, world, seen
        self._g = np.zeros(len(problem.samples))
        self._beta = np.zeros(problem.linear.shape)
        self._groups: list[Group] = []
        self.has_moved = False
        self.num_kernel_values = 0

    def leave(self, going: Active) -> None:
        """These samples are eliminated now. Collective if samples have moved."""
        positions = self._go_home(going, "sending eliminated samples home")
        if len(positions):
            self._groups.append(Group(positions, self._seen.weights.copy()))

    def come_back(self, active: Active, rows: Samples) -> Active:
        """All of this rank's own samples with right gradients. Collective if samples have moved.

        Args:
            active: Those that were never eliminated.
            rows: All, in the precision of the kernel rows.
        """
        self._go_home(active, "sending active samples home")
        for group in self._groups:
            change = self._seen.weights.copy()
            change[: len(group.reference)] -= group.reference
            self._g[group.positions] += self._sums(change, rows, group.positions)
        self._groups, self.has_moved = [], False
        everyone = Active.of(self._problem, rows)
        everyone.g, everyone.beta = self._g.copy(), self._beta.copy()
        return everyone

    def _sums(
        self, weights: NDArray[np.float64], rows: Samples, positions: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        support = np.flatnonzero(weights)
        self.num_kernel_values += len(support) * len(positions)
        behind = self._seen.at(support).astype(rows.dtype)
        return np.asarray(
            expand(self._problem.kernel, behind, weights[None, support], rows.take(positions))[0]
        )

    def _go_home(self, active: Active, doing: str) -> NDArray[np.int64]:
        """Keep g and beta of own samples, and send those of others to their ranks; returns own positions."""
        ids, values = active.samples.ids, np.column_stack([active.g, active.beta.T])
        if self.has_moved:
            is_own = self._seen.home_of(ids) >= 0
            width = values.shape[1]
            sent_ids = np.concatenate(self._world.gather_uneven(ids[~is_own], doing))
            sent = np.concatenate(self._world.gather_uneven(values[~is_own].ravel(), doing)).reshape(
                -1, width
            )
            is_mine = self._seen.home_of(sent_ids) >= 0
            ids = np.concatenate([ids[is_own], sent_ids[is_mine]])
            values = np.concatenate([values[is_own], sent[is_mine]])
        positions = self._seen.home_of(ids)
        self._g[positions] = values[:, 0]
        self._beta[:, positions] = values[:, 1:].T
        return positions


def may_violate(active: Active, nominations: Nominations) -> NDArray[np.bool_]:
    """Which active samples have a variable that violates with any other, or may yet, shape (N,)."""
    f = active.g + active.linear
    useful = (active.beta < active.upper) & (f <= nominations.most)
    useful |= (active.beta > active.lower) & (f >= nominations.least)
    return np.asarray(useful.any(axis=0), np.bool_)


def is_out_of_balance(nominations: Nominations, num_samples: int) -> bool:
    """Whether elimination has left some rank with much more to do than others."""
    counts = nominations.counts
    excess = counts.max() - counts.mean()
    was_eliminated = nominations.num_active < num_samples
    return bool(was_eliminated and excess > max((_IMBALANCE - 1) * counts.mean(), _IMBALANCE_SAMPLES))
