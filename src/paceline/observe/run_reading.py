"""Reads a run folder, also an unfinished one, and aligns the ranks' clocks. No torch.

A file may be cut off, ranks may have left nothing, and lines may be of another job or kind. They are left out, and
`Run.notes` says so. A folder without a run, or with one of another version, is an error.

Ranks under one boot of one kernel share `perf_counter`. Others are aligned by the ends of their steps. All ranks
leave a step at almost the same moment: within a round trip, or a chunk after each other on a slow ring. Drift is
taken out by them, too: two good clocks part by a millisecond in a minute. No collective of our own is used: a rank
that is not recorded would not take part in it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from paceline.observe.run_folder import header_of
from paceline.observe.run_lines import from_line
from paceline.observe.run_records import Health, Labels, RankHeader, Record, RunHeader, Sample, StepRecord


@dataclass
class RankRun:
    """The records of one rank; of its last process, if it was started again."""

    header: RankHeader  # who it is
    steps: list[StepRecord] = field(default_factory=list)  # in order
    samples: list[Sample] = field(default_factory=list)  # in order
    labels: tuple[str, ...] = ()  # what indices in `StepRecord.gradient_marks` mean
    sizes: tuple[int, ...] = ()  # as `Labels`
    bucket_bytes: int = 0
    health: list[Health] = field(default_factory=list)  # in order
    is_cut: bool = False  # whether its file ends in mid-line

    def add(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self.steps.append(record)
        elif isinstance(record, Sample):
            self.samples.append(record)
        elif isinstance(record, Labels):
            self.labels, self.sizes, self.bucket_bytes = record.names, record.sizes, record.bucket_bytes
        elif isinstance(record, Health):
            self.health.append(record)


@dataclass(frozen=True)
class Run:
    """The readable part of a run."""

    header: RunHeader  # who ran what
    ranks: tuple[RankRun, ...]  # those that left something, in order of rank
    notes: tuple[str, ...] = ()  # what is missing or was left out, in words

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks by their headers, or 0 if no rank wrote one."""
        return max((rank.header.num_ranks for rank in self.ranks), default=0)

    def rows(self) -> list[tuple[StepRecord, ...]]:
        """Return the steps that every rank here has recorded. Each is one record per rank, in the order of `ranks`."""
        by_step = [{record.step: record for record in rank.steps} for rank in self.ranks]
        common = set(by_step[0]).intersection(*by_step[1:]) if by_step else set()
        return [tuple(steps[step] for steps in by_step) for step in sorted(common)]


def read_run(folder: Path) -> Run:
    """Read what is there, also while ranks write. Raises ConfigurationError if it is no run of this version."""
    header = header_of(folder)
    paths = [(int(found[1]), path) for path in folder.iterdir() if (found := _RANK_FILE.fullmatch(path.name))]
    paths.sort(key=lambda x: (x[0], ".before." not in x[1].name))
    return run_of(header, {path.name: path.read_bytes() for _, path in paths})


def run_of(header: RunHeader, files: Mapping[str, bytes]) -> Run:
    """Read ranks' lines, by the names of the files that they come from; a rank's earlier ones first."""
    reader = _Reader(header.run_id)
    for name, lines in files.items():
        reader.read(name, lines)
    ranks = tuple(reader.ranks[rank] for rank in sorted(reader.ranks))
    run = Run(header, ranks)
    return Run(header, ranks, (*reader.notes(), *_missing(run)))


_RANK_FILE = re.compile(r"rank(\d+)(\.before)?\.jsonl")


class _Reader:
    """The reader of ranks' lines. It collects what was wrong with them."""

    def __init__(self, run_id: str) -> None:
        self.ranks: dict[int, RankRun] = {}
        self._run_id = run_id
        self._unreadable: Counter[str] = Counter()
        self._unknown: Counter[str] = Counter()
        self._foreign: Counter[str] = Counter()
        self._restarted: Counter[int] = Counter()

    def read(self, name: str, words: bytes) -> None:
        lines = words.split(b"\n")
        under: RankRun | None = None
        for line in filter(None, lines[:-1]):
            try:
                record = from_line(line)
            except (ValueError, RecursionError):
                self._unreadable[name] += 1
                continue
            if record is None:
                self._unknown[name] += 1
            elif isinstance(record, RankHeader):
                under = self._life(record)
            if under is None:
                self._foreign[name] += 1
            elif record is not None:
                under.add(record)
        if under is not None:
            under.is_cut = bool(lines[-1])

    def _life(self, header: RankHeader) -> RankRun | None:
        """Return the rank's life that begins with this header; None if it belongs to another run."""
        if header.run_id != self._run_id:
            return None
        before = self.ranks.get(header.rank)
        if before is not None and before.header == header:
            return before  # its second file
        if before is not None:
            self._restarted[header.rank] += 1
        self.ranks[header.rank] = RankRun(header)
        return self.ranks[header.rank]

    def notes(self) -> list[str]:
        found = [
            f"{name}: {count} lines {words}"
            for counts, words in (
                (self._unreadable, "could not be read"),
                (self._unknown, "of kinds that this version does not know"),
                (self._foreign, "of another job, which writes into the same folder, were left out"),
            )
            for name, count in sorted(counts.items())
        ]
        return found + [
            f"rank {rank} was started {count + 1} times; its last life counts"
            for rank, count in sorted(self._restarted.items())
        ]


def _missing(run: Run) -> list[str]:
    here = {rank.header.rank for rank in run.ranks}
    absent = [rank for rank in range(run.num_ranks) if rank not in here]
    notes = []
    if not here:
        notes.append("no rank has recorded anything: it trains with another wrapper, or ended before")
    if absent:
        notes.append(f"ranks {', '.join(map(str, absent))} of {run.num_ranks} left no record")
    for rank in run.ranks:
        last = rank.steps[-1].step if rank.steps else 0
        if rank.is_cut:
            notes.append(f"rank {rank.header.rank}'s file is cut off in mid-write, after step {last}")
        elif not rank.steps:
            notes.append(f"rank {rank.header.rank} has completed no step")
    return notes


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
        return time_s + self.shift_s + self.drift * (time_s - self.from_s)


def clock_offsets(run: Run) -> dict[int, ClockOffset]:
    """Return the offset of each rank's clock from that of the first rank in the run."""
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
