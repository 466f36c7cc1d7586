"""Brings the ranks' clocks together: what to add to each rank's times, and how far off that may be. No torch.

Ranks under one boot of one kernel share `perf_counter`. Others are aligned by the ends of their steps. All ranks
leave a step at almost the same moment: within a round trip, or a chunk after each other on a slow ring. Drift is
taken out by them, too: two good clocks part by a millisecond in a minute. No collective of our own is used: a rank
that is not recorded would not take part in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from paceline.observe.run_reading import RankRun, Run

_FEWEST_FOR_DRIFT = 20  # steps


@dataclass(frozen=True)
class ClockOffset:
    """`time + shift_s + drift * (time - from_s)` is a rank's time on the first rank's clock."""

    shift_s: float  # to add at `from_s`
    drift: float  # seconds to add a second after that
    from_s: float  # on the rank's own clock
    error_s: float  # half the range in which nine of ten of what it was made from lie; 0: the same clock
    source: str  # "same clock", "ends of steps" or "none": nothing in common

    def aligned_s(self, time_s: float) -> float:
        """A time of this rank on the first rank's clock."""
        return time_s + self.shift_s + self.drift * (time_s - self.from_s)


def clock_offsets(run: Run) -> dict[int, ClockOffset]:
    """Return for each rank of a run what brings its times to the clock of the first one there."""
    if not run.ranks:
        return {}
    first = run.ranks[0]
    return {rank.header.rank: _offset(first, rank) for rank in run.ranks}


def _offset(first: RankRun, rank: RankRun) -> ClockOffset:
    if rank is first or (rank.header.boot_id and rank.header.boot_id == first.header.boot_id):
        return ClockOffset(0.0, 0.0, rank.header.began_s, 0.0, "same clock")
    theirs = {step.step: step.ended_s for step in first.steps}
    ends = [(step.ended_s, theirs[step.step] - step.ended_s) for step in rank.steps if step.step in theirs]
    drift = _slope(ends)
    if not ends:
        return ClockOffset(0.0, 0.0, rank.header.began_s, float("inf"), "none")
    from_s = ends[0][0]
    shifts = [shift - drift * (time_s - from_s) for time_s, shift in ends]
    return ClockOffset(median(shifts), drift, from_s, _half_range(shifts), "ends of steps")


def _slope(ends: Sequence[tuple[float, float]]) -> float:
    """Return the slope from the median of the first third to that of the last; 0 for few."""
    if len(ends) < _FEWEST_FOR_DRIFT:
        return 0.0
    third = len(ends) // 3
    early, late = ends[:third], ends[-third:]
    apart_s = median(x[0] for x in late) - median(x[0] for x in early)
    moved_s = median(x[1] for x in late) - median(x[1] for x in early)
    # Ends of steps scatter by the time of a chunk: over a short run that would pass for drift.
    return moved_s / apart_s if apart_s > 30.0 else 0.0


def _half_range(values: Sequence[float]) -> float:
    ordered = sorted(values)
    left_out = len(ordered) // 20
    return (ordered[len(ordered) - 1 - left_out] - ordered[left_out]) / 2
