"""Are two ways to train different, or only their seeds?"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.05


@dataclass(frozen=True)
class Spread:
    """Accuracies of the same thing under several seeds, in percent."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def std(self) -> float:
        """Of the sample; 0 for a single value."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    def __str__(self) -> str:
        if len(self.values) == 1:
            return f"{self.mean:.1f} (1 seed)"
        return f"{self.mean:.1f} ± {self.std:.1f}"


def p_value(left: Sequence[float], right: Sequence[float]) -> float:
    """How often a relabelling of the values has means as far apart as theirs: the exact permutation test, two-sided.

    With 5 and 5 values it can be as small as 2/252; with 3 and 3 it cannot be below 0.1. No distribution is assumed,
    which matters here: a diverged run is no normal deviate.
    """
    pooled = [*left, *right]
    total, n = sum(pooled), len(left)
    observed = abs(sum(left) / n - sum(right) / len(right))
    splits = [sum(chosen) for chosen in itertools.combinations(pooled, n)]
    distances = [abs(part / n - (total - part) / len(right)) for part in splits]
    return sum(distance >= observed - 1e-9 for distance in distances) / len(distances)
