"""The variables that are optimised together, from turn to turn: how many, which of them stay, which are new."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.svm.nominations import FIELDS, Nominations
from paceline.svm.selection import choose, working_set_size


class WorkingSet:
    """Chooses working sets, one after another; alike on every rank.

    Args:
        num_variables: Of the problem.
        size: Of every working set; None chooses by the problem.

    Attributes:
        size: Of the next working set, at most.
        kept: Variables of the last one that stay, shape (M, FIELDS).
        num_new: How many of the current one are new; they are its last ones.
    """

    def __init__(self, num_variables: int, size: int | None) -> None:
        self._num_variables, self._fixed = num_variables, size
        self.size = size or working_set_size(num_variables)
        self.num_new = 0
        self.kept: NDArray[np.float64] = np.zeros((0, FIELDS))

    @property
    def room(self) -> int:
        """How many may be new next time."""
        return self.size - len(self.kept)

    def choose(self, nominations: Nominations) -> NDArray[np.float64]:
        """The next working set: (gradient, variable, coefficient, least, largest) a row, the newest last."""
        new = choose(nominations, self.room)
        kept = self.kept.copy()
        kept[:, 0] = nominations.kept
        self.num_new = len(new)
        if self._fixed is None:
            self.size = working_set_size(self._num_variables, nominations.num_free)
        self.kept = new[: self.size // 2]
        return np.concatenate([kept, new])

    def change(self, beta: NDArray[np.float64]) -> None:
        """The current one's coefficients are these now."""
        self.kept[:, 2] = beta[len(beta) - self.num_new :][: len(self.kept)]

    def clear(self) -> None:
        """None stays."""
        self.kept = np.zeros((0, FIELDS))
