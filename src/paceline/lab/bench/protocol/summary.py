"""What do many samples say in one line?"""

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
    def of(cls, samples: Sequence[float]) -> "Summary":
        """Summarise at least one sample."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0], samples[0], 1)
        lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, lower, upper, min(samples), len(samples))

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
