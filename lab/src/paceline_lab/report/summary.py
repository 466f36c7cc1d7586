"""Many samples in one line: median and quartiles, or mean and deviation; and whether two sets of samples differ."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """Median and quartiles of `num_samples` samples, in the samples' unit."""

    median: float
    lower_quartile: float
    upper_quartile: float
    minimum: float
    num_samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Summary:
        """Summarise at least one sample."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0], samples[0], 1)
        lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, lower, upper, min(samples), len(samples))

    def times(self, factor: float) -> Summary:
        """Return the same in another unit, `factor` of which are one of this."""
        return Summary(
            factor * self.median,
            factor * self.lower_quartile,
            factor * self.upper_quartile,
            factor * self.minimum,
            self.num_samples,
        )

    def text(self, scale: float = 1.0, digits: int = 2) -> str:
        """Return 'median (lower..upper)', each multiplied by `scale`."""
        values = [
            f"{value * scale:.{digits}f}" for value in (self.median, self.lower_quartile, self.upper_quartile)
        ]
        return f"{values[0]} ({values[1]}..{values[2]})"


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Pair the rounds of two sides: what both met in the same round cancels."""
    return [above / below for above, below in zip(numerators, denominators, strict=True)]


def differences(minuends: Sequence[float], subtrahends: Sequence[float]) -> list[float]:
    """Pair the rounds of two sides by subtraction."""
    return [left - right for left, right in zip(minuends, subtrahends, strict=True)]


def slowest_rank(samples_per_rank: Sequence[Sequence[float]]) -> list[float]:
    """Return, for each step, the largest of all ranks' times."""
    return [max(step) for step in zip(*samples_per_rank, strict=True)]


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
        """Return the sample's standard deviation; 0 for a single value."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    def __str__(self) -> str:
        if len(self.values) == 1:
            return f"{self.mean:.1f} (1 seed)"
        return f"{self.mean:.1f} ± {self.std:.1f}"


def p_value(left: Sequence[float], right: Sequence[float]) -> float:
    """Return how often a relabelling of the values has means as far apart: the exact permutation test, two-sided.

    With 5 and 5 values it can be as small as 2/252; with 3 and 3 it cannot be below 0.1. No distribution is assumed,
    which matters here: a diverged run is no normal deviate.
    """
    pooled = [*left, *right]
    total, n = sum(pooled), len(left)
    observed = abs(sum(left) / n - sum(right) / len(right))
    splits = [sum(chosen) for chosen in itertools.combinations(pooled, n)]
    distances = [abs(part / n - (total - part) / len(right)) for part in splits]
    return sum(distance >= observed - 1e-9 for distance in distances) / len(distances)
