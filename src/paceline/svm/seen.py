"""The samples that were ever in a working set, with their coefficients, on every rank: the future support vectors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.svm.exchange import from_everyone
from paceline.svm.problem import Problem
from paceline.svm.samples import DenseSamples, Samples
from paceline.svm.world import World


class Seen:
    """What every rank knows of the samples that were chosen. Alone, a rank has seen all of its own.

    Args:
        problem: This rank's part.
        world: The ranks.
        rows: This rank's samples in the precision of the kernel rows.

    Attributes:
        weights: Coefficients summed over a sample's variables, in the order in which the samples came.
    """

    def __init__(self, problem: Problem, world: World, rows: Samples) -> None:
        self._problem, self._world, self._rows = problem, world, rows
        self._home = np.full(problem.num_samples, -1, np.int64)
        self._home[problem.samples.ids] = np.arange(len(problem.samples))
        self._is_alone = world.num_ranks == 1
        self._at = self._home if self._is_alone else np.full(problem.num_samples, -1, np.int64)
        self._samples: Samples = problem.samples if self._is_alone else problem.samples.take(slice(0, 0))
        self._room: DenseSamples | None = None
        self.weights = np.zeros(len(self._samples))

    def use(self, rows: Samples) -> None:
        """Kernel rows have another precision from now on."""
        self._rows = rows

    def fetch_all(self) -> None:
        """Let every rank have all samples, where that is little: no turn has to exchange rows then. Collective."""
        if not self._is_alone:
            self.fetch(np.arange(self._problem.num_samples))

    def fetch(self, ids: NDArray[np.int64]) -> None:
        """Make sure that every rank has these samples. Collective; every rank passes the same."""
        missing = ids[self._at[ids] < 0]
        if len(missing) == 0:
            return
        missing = np.unique(missing)
        own = self._home[missing]
        mine, doing = self._problem.samples.take(own[own >= 0]), "exchanging rows"
        if isinstance(mine, DenseSamples):
            # One owner each, so the sum is exact: one exchange instead of four.
            rows = np.zeros((len(missing), mine.rows.shape[1]), mine.dtype)
            rows[own >= 0] = mine.rows
            self._append(DenseSamples.of(self._world.total(rows, doing), missing))
        else:
            self._append(from_everyone(self._world, mine, doing))

    def _append(self, new: Samples) -> None:
        first = len(self._samples)
        last = first + len(new)
        self._at[new.ids] = np.arange(first, last)
        self.weights = np.concatenate([self.weights, np.zeros(len(new))])
        if first == 0 or not isinstance(new, DenseSamples):
            self._samples = self._samples.joined(new) if first else new
            return
        if (
            self._room is None or len(self._room) < last
        ):  # twice as much room, so a row is moved once or twice
            more = max(last, 1024)
            room = self._samples.joined(
                DenseSamples(
                    np.zeros(more, np.int64), np.zeros((more, new.rows.shape[1]), new.dtype), np.zeros(more)
                )
            )
            assert isinstance(room, DenseSamples)
            self._room = room
        chosen = slice(first, last)
        self._room.ids[chosen], self._room.rows[chosen], self._room.squares[chosen] = (
            new.ids,
            new.rows,
            new.squares,
        )
        self._samples = self._room.take(slice(0, last))

    def add(self, ids: NDArray[np.int64], change: NDArray[np.float64]) -> None:
        """Add to the coefficients of samples that were fetched."""
        self.weights[self._at[ids]] += change

    def panel(self, ids: NDArray[np.int64]) -> Samples:
        """Samples that were fetched, in the precision of the kernel rows."""
        if self._is_alone:
            return self._rows.take(self._at[ids])
        return self._samples.take(self._at[ids]).astype(self._rows.dtype)

    def at(self, positions: NDArray[np.int64]) -> Samples:
        """Samples by their place in `weights`, in the precision in which they were passed."""
        return self._samples.take(positions)

    def home_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions among this rank's own samples, or -1."""
        return self._home[ids]
