"""Which variables are optimised together? The worst violators of all ranks, and those that came in last time.

Rules
1. Every rank nominates its own; all ranks see all nominations and choose alike, so no rank has to be asked twice.
2. Ties are broken by the variable's scrambled number: the choice does not depend on the number of ranks, and the first
   working set, when all are tied, is a sample of the whole set even if the rows are sorted.
3. The newer half of the last working set stays, or variables would come and go in pairs of sets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.svm.compiled import FAR

_FIELDS = 5  # of a nomination: gradient, variable, coefficient, its least and its largest value
_LARGE_PROBLEM = 24_000
_ONE_SET = 2_048


@dataclass(frozen=True)
class Nominations:
    """What a rank says before a working set is chosen, or what all said.

    Attributes:
        least: Smallest gradient among variables that may grow.
        most: Largest gradient among variables that may shrink.
        num_active: Active samples.
        num_support: Samples with a coefficient.
        num_repeats: Kernel rows that were computed again for want of room; of all ranks the most.
        counts: Active samples of every rank.
        growing: Best candidates to grow, best first, shape (<= k, 5).
        shrinking: Best candidates to shrink, likewise.
        kept: Gradients of the variables that stay, -inf where the rank does not have them.
    """

    least: float
    most: float
    num_active: int
    num_support: int
    num_repeats: int
    growing: NDArray[np.float64]
    shrinking: NDArray[np.float64]
    kept: NDArray[np.float64]
    counts: NDArray[np.int64]

    def pack(self, num: int) -> NDArray[np.float64]:
        """One array whose shape depends on `num` candidates of a kind and the variables that stay only."""
        out = np.full((2 + 2 * num, _FIELDS), np.nan)
        out[0] = self.least, self.most, self.num_active, self.num_support, self.num_repeats
        out[2 : 2 + len(self.growing)] = self.growing
        out[2 + num : 2 + num + len(self.shrinking)] = self.shrinking
        return np.concatenate([out.ravel(), self.kept])

    @classmethod
    def unpack(cls, packed: NDArray[np.float64], num: int) -> Nominations:
        """Every rank's nominations as one, from the packed ones, shape (ranks, packed size)."""
        table = packed[:, : (2 + 2 * num) * _FIELDS].reshape(len(packed), -1, _FIELDS)
        heads = table[:, 0]
        return cls(
            least=float(heads[:, 0].min()),
            most=float(heads[:, 1].max()),
            num_active=int(heads[:, 2].sum()),
            num_support=int(heads[:, 3].sum()),
            num_repeats=int(heads[:, 4].max()),
            growing=_in_order(table[:, 2 : 2 + num], 1.0),
            shrinking=_in_order(table[:, 2 + num :], -1.0),
            kept=packed[:, (2 + 2 * num) * _FIELDS :].max(axis=0),
            counts=heads[:, 2].astype(np.int64),
        )

    @property
    def gap(self) -> float:
        """The largest violation."""
        return self.most - self.least


def _in_order(table: NDArray[np.float64], sign: float) -> NDArray[np.float64]:
    rows = table.reshape(-1, _FIELDS)
    rows = rows[~np.isnan(rows[:, 0])]
    return rows[np.lexsort((scrambled(rows[:, 1].astype(np.int64)), sign * rows[:, 0]))]


def scrambled(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Different numbers for different ones below 2^32, in no apparent order."""
    return np.asarray((numbers * 2_654_435_761) & 0xFFFFFFFF)


def best(values: NDArray[np.float64], numbers: NDArray[np.int64], num: int) -> NDArray[np.int64]:
    """Positions of the `num` smallest values below `FAR`, or fewer if there are fewer, in no order.

    Args:
        values: Shape (N,).
        numbers: Of the variables, shape (N,); they decide if all values are the same, as they are at the start.
        num: How many.
    """
    if len(values) > num:
        chosen = np.argpartition(values, num - 1)[:num]
        least, largest = values[chosen].min(), values[chosen].max()
        if least < FAR and least == largest:
            tied = np.flatnonzero(values == least)
            if len(tied) > num:
                chosen = tied[np.argpartition(scrambled(numbers[tied]), num - 1)[:num]]
        return np.asarray(chosen[values[chosen] < FAR])
    return np.flatnonzero(values < FAR)


def choose(nominations: Nominations, num: int) -> NDArray[np.float64]:
    """`num` nominated variables, taken in turn from both lists, each once; shape (<= num, 5)."""
    growing, shrinking = nominations.growing, nominations.shrinking
    both = np.concatenate([growing, shrinking])
    turn = np.concatenate([2 * np.arange(len(growing)), 2 * np.arange(len(shrinking)) + 1])
    both = both[np.argsort(turn, kind="stable")]
    _, first = np.unique(both[:, 1], return_index=True)
    return both[np.sort(first)[:num]]


def working_set_size(num_variables: int, num_samples: int) -> int:
    """A size that suits the problem; even. Small problems are one working set."""
    if num_variables <= _ONE_SET:
        return max(2, num_variables + num_variables % 2)
    largest = 2_048 if num_samples >= _LARGE_PROBLEM else 1_024
    return min(largest, num_variables // 4 // 2 * 2)
