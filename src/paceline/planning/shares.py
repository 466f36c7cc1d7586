"""Shares by speed: how long a rank takes for n samples, learnt from its steps, and the shares that finish soonest.

A step ends when its last rank has its gradients. Rank r takes T_r(n) = f_r + a_r n seconds for n > 0 samples of a step,
and nothing for 0. We look for the shares with the smallest max T_r(n_r), for a given sum of n_r. With them no rank
could give a sample to another one that would still end sooner: all finish together, up to a sample. The makespan is
the time until the last rank is done. Its lower bound is what fractions of samples would reach: the T at which sum (T
- f_r) / a_r is the whole batch.
"""

from __future__ import annotations

import heapq
import math
import operator
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.errors import ConfigurationError

_MEMORY_STEPS = 24  # measured steps that an estimate rests on, at most
_DRIFT_RATIO = 0.2  # so far off, to the same side, ...
_DRIFT_STEPS = 4  # ... so often in a row: the rank's speed is another one now
_MEDIAN_ERROR = 1.25  # a median's standard error over a mean's
_DOUBT_RATIO = 0.25  # by how much of a step n measured steps may all mislead, times n^1.5
# largest over smallest number of samples from which fixed and per-sample time are told apart
_LEAST_SPREAD = 1.15


@dataclass(frozen=True)
class Speed:
    """A rank's time for its samples of one step.

    Attributes:
        fixed_s: Seconds that a step takes however few they are.
        sample_s: Seconds that each adds.
    """

    fixed_s: float
    sample_s: float

    def step_s(self, num_samples: int) -> float:
        """Return the seconds until the gradients of `num_samples` are computed."""
        return self.fixed_s + self.sample_s * num_samples if num_samples else 0.0

    def times(self, factor: float) -> Speed:
        """Return the speed of the same rank, slower by `factor`."""
        return Speed(self.fixed_s * factor, self.sample_s * factor)


class SpeedEstimate:
    """Learns a rank's `Speed` from its steps.

    Fixed and per-sample time can be told apart once steps of different size were seen. Until then all time is taken to
    be per sample. Afterwards as much of it is as the noise of the steps allows. A fixed time that does not exist would
    promise shares far from any that was seen. What counts most is the time at the present size: the line goes through
    its median. A speed that changes suddenly is noticed by the fourth step in a row that is far off, and then earlier
    steps are forgotten.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=_MEMORY_STEPS)  # samples, seconds
        # relative, of steps that were not far off, and not the first ones of a size
        self._residuals: deque[float] = deque(maxlen=_MEMORY_STEPS)
        self._shape: Speed | None = None  # the last one that steps of different size gave
        self._speed: Speed | None = None  # what follows from all this; None: not known yet
        self._num_off = 0  # steps in a row that are far off, negative if they were faster

    def __len__(self) -> int:
        """Return the number of steps that the estimate rests on."""
        return len(self._seen)

    def add(self, num_samples: int, seconds: float) -> None:
        """Note that a step with `num_samples`, more than 0, took `seconds`."""
        if self._seen:
            expected_s = self.speed.step_s(num_samples)
            residual = seconds / expected_s - 1
            side = 0 if abs(residual) <= _DRIFT_RATIO else 1 if residual > 0 else -1
            self._num_off = self._num_off + side if side and side * self._num_off >= 0 else side
            if not side and num_samples == self._seen[-1][0]:  # else it is the line that was wrong
                self._residuals.append(residual)
        self._seen.append((num_samples, seconds))
        self._speed = None
        if abs(self._num_off) >= _DRIFT_STEPS:
            self._shape = self.speed
            recent = list(self._seen)[-_DRIFT_STEPS:]
            self._seen.clear()
            self._seen.extend(recent)
            self._num_off, self._speed = 0, None

    @property
    def speed(self) -> Speed:
        """Return the best estimate so far, after at least one step."""
        if self._speed is None:
            now = self._seen[-1][0]
            shape = self._fit() or self._shape or Speed(0.0, 1.0)
            factors = [seconds / shape.step_s(n) for n, seconds in self._seen if n == now]
            self._speed = shape.times(statistics.median(factors))
        return self._speed

    def _fit(self) -> Speed | None:
        """Return the line through the medians of steps of equal size; None while they are too much alike."""
        by_size: dict[int, list[float]] = {}
        for num_samples, seconds in self._seen:
            by_size.setdefault(num_samples, []).append(seconds)
        if max(by_size) < _LEAST_SPREAD * min(by_size):
            return None
        points = [(n, statistics.median(times), len(times)) for n, times in by_size.items()]
        weight = sum(count for _, _, count in points)
        mean_n = sum(n * count for n, _, count in points) / weight
        mean_s = sum(s * count for _, s, count in points) / weight
        spread = sum(count * (n - mean_n) ** 2 for n, _, count in points)
        slope = sum(count * (n - mean_n) * (s - mean_s) for n, s, count in points) / spread
        slope = min(slope + _MEDIAN_ERROR * self._deviation * mean_s / math.sqrt(spread), mean_s / mean_n)
        if slope <= 0:
            return None
        self._shape = Speed(mean_s - slope * mean_n, slope)
        return self._shape

    @property
    def _deviation(self) -> float:
        """Return the relative standard deviation of a step from the speed, without steps that were far off."""
        return 1.4826 * statistics.median(map(abs, self._residuals)) if self._residuals else 0.0

    @property
    def error_ratio(self) -> float:
        """Return by how much the median step at the present size may be wrong, relative to it.

        Twice its standard error, and more while few steps were seen, because all of them may have been disturbed.
        """
        now = self._seen[-1][0]
        num_steps = sum(n == now for n, _ in self._seen)
        return 2 * _MEDIAN_ERROR * self._deviation / math.sqrt(num_steps) + _DOUBT_RATIO / (
            num_steps * math.sqrt(num_steps)
        )


def makespan_s(speeds: Sequence[Speed], samples: Sequence[int]) -> float:
    """Return the seconds until the last rank has its gradients."""
    return max(speed.step_s(n) for speed, n in zip(speeds, samples, strict=True))


def lower_bound_s(speeds: Sequence[Speed], total: int) -> float:
    """Return the seconds that `total` samples would take if samples could be divided. No shares are faster.

    A rank whose fixed time alone is longer is left out.
    """
    by_fixed = sorted(speeds, key=lambda speed: speed.fixed_s)
    rate = constant = 0.0
    best_s = math.inf
    for place, speed in enumerate(by_fixed):
        rate += 1 / speed.sample_s
        constant += speed.fixed_s / speed.sample_s
        best_s = (total + constant) / rate
        if place + 1 == len(by_fixed) or best_s <= by_fixed[place + 1].fixed_s:
            break
    return best_s


def best_shares(
    speeds: Sequence[Speed], total: int, most: Sequence[int] | None = None, least: int = 1, unit: int = 1
) -> tuple[int, ...]:
    """Return the samples of each rank, `total` together, with which the last rank finishes soonest.

    Args:
        speeds: Each rank's.
        total: Samples to divide; a multiple of `unit`.
        most: What each rank can hold; None: no limits.
        least: What each rank gets at least.
        unit: Every rank's samples are a multiple of it.

    Contract:
        Local. The same arguments give the same shares on every rank.

    Cost:
        O(P log P) for P ranks, after some ten passes over them.

    Raises:
        ConfigurationError: The ranks together cannot hold `total`, or there are fewer than `least` for each.
    """
    units = total // unit
    floors = [math.ceil(least / unit)] * len(speeds)
    limits = [units] * len(speeds) if most is None else [min(limit // unit, units) for limit in most]
    if sum(limits) < units or sum(floors) > units or any(map(operator.gt, floors, limits)):
        raise ConfigurationError(
            f"{total} samples cannot be divided among ranks that hold {list(limits)} at most and {least} at least"
            + (f", in units of {unit}" if unit > 1 else "")
            + ". Make the global batch smaller, or the limits wider."
        )
    given = _all_but_a_few(speeds, units, floors, limits, unit)
    _give_the_rest(speeds, given, units, limits, unit)
    return tuple(n * unit for n in given)


def _all_but_a_few(
    speeds: Sequence[Speed], units: int, floors: Sequence[int], limits: Sequence[int], unit: int
) -> list[int]:
    """Return the units that each rank finishes within a time. Bisection finds it: at most one per rank is left."""

    def within(time_s: float) -> list[int]:
        return [
            max(low, min(high, math.floor((time_s - speed.fixed_s) / (speed.sample_s * unit))))
            for speed, low, high in zip(speeds, floors, limits, strict=True)
        ]

    early_s, late_s = 0.0, max(speed.step_s(units * unit) for speed in speeds)
    given = within(early_s)
    for _ in range(60):
        if units - sum(given) <= len(speeds):
            break
        middle_s = (early_s + late_s) / 2
        earlier = within(middle_s)
        if sum(earlier) <= units:
            early_s, given = middle_s, earlier
        else:
            late_s = middle_s
    return given


def _give_the_rest(
    speeds: Sequence[Speed], given: list[int], units: int, limits: Sequence[int], unit: int
) -> None:
    """Add the remaining units to `given`, each to the rank that finishes it first, or the lowest of equal ranks."""
    waiting = [
        (speed.step_s((n + 1) * unit), rank)
        for rank, (speed, n, limit) in enumerate(zip(speeds, given, limits, strict=True))
        if n < limit
    ]
    heapq.heapify(waiting)
    for _ in range(units - sum(given)):
        _, rank = heapq.heappop(waiting)
        given[rank] += 1
        if given[rank] < limits[rank]:
            heapq.heappush(waiting, (speeds[rank].step_s((given[rank] + 1) * unit), rank))


@dataclass(frozen=True)
class Proposal:
    """Other shares, and the predicted gain.

    Attributes:
        samples: Each rank's in a step.
        now_s: Predicted seconds until the last rank has its gradients, with the present shares.
        then_s: The same with these.
        lower_bound_s: The same if samples could be divided.
        error_ratio: How far `now_s`, the time of the last rank, may be wrong. It is at least that of a typical rank,
            because the last one may be last by error.
    """

    samples: tuple[int, ...]
    now_s: float
    then_s: float
    lower_bound_s: float
    error_ratio: float

    def pays(self, gain_ratio: float) -> bool:
        """Return whether these shares save that fraction of the step, beyond the error of the measurement."""
        return 1 - self.then_s / self.now_s > gain_ratio + self.error_ratio


def propose(
    estimates: Sequence[SpeedEstimate],
    samples: Sequence[int],
    most: Sequence[int] | None = None,
    least: int = 1,
    unit: int = 1,
    gain_ratio: float = 0.0,
) -> Proposal:
    """Return the best shares by the known speeds; the present ones where not even the lower bound would pay.

    Args:
        estimates: Each rank's.
        samples: What each has now.
        most: As of `best_shares`, and what follows.
        least: As of `best_shares`.
        unit: As of `best_shares`.
        gain_ratio: The fraction of a step that other shares have to save.
    """
    speeds = [estimate.speed for estimate in estimates]
    now_s = makespan_s(speeds, samples)
    best_s = lower_bound_s(speeds, sum(samples))
    last = max(range(len(speeds)), key=lambda rank: speeds[rank].step_s(samples[rank]))
    present = Proposal(tuple(samples), now_s, now_s, best_s, estimates[last].error_ratio)
    if not replace(present, then_s=best_s).pays(gain_ratio):
        return present
    shares = best_shares(speeds, sum(samples), most, least, unit)
    typical = math.sqrt(statistics.fmean(estimate.error_ratio**2 for estimate in estimates))
    error_ratio = max(present.error_ratio, typical)
    return replace(present, samples=shares, then_s=makespan_s(speeds, shares), error_ratio=error_ratio)
