"""Remedies, each with the predicted step; None where the records do not say it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from paceline.diagnosis.causes import COMPUTES, Cause, waits_for_processes
from paceline.diagnosis.culprit import Culprit
from paceline.diagnosis.links import SlowLink
from paceline.diagnosis.step_table import StepTable
from paceline.diagnosis.what_if import (
    Prediction,
    exposed_s,
    phases_s,
    shorter_by,
    with_wire,
    with_work,
    without,
)
from paceline.observe.run_reading import Run
from paceline.observe.run_records import StepRecord
from paceline.planning.bucket_assignment import MEBIBYTE
from paceline.planning.forward_overlap import MeasuredStep, cut, plan, predict
from paceline.planning.replay import AlphaBetaCost, Wire, replay
from paceline.planning.shares import Speed, lower_bound_s
from paceline.quantities import ms

if TYPE_CHECKING:
    from paceline.diagnosis.findings import Diagnosis

_FEWEST_STEPS = 12
_APART = 1.2  # sizes that say what of a bucket's time is fixed
_RATE_BYTES = 2**20  # of buckets that are alike: from here on nothing is
_WORTH_GAIN = 0.03  # of a step: what is predicted to gain less is not named


@dataclass(frozen=True)
class _Link:
    """The times of a median step on the link: those of the last rank, and the shortest waits."""

    ready_s: list[float]  # of each bucket, since backward began on the last rank
    lasts_s: list[float]  # under way
    sizes: list[int]  # bytes
    backward_s: float
    forward_s: float

    @property
    def cost(self) -> AlphaBetaCost | None:
        """Return the cost of a message, by the smaller and the larger half of the buckets. None if all are alike."""
        order = sorted(range(len(self.sizes)), key=self.sizes.__getitem__)
        halves = [order[: (len(order) + 1) // 2], order[len(order) // 2 :]]
        small, large = (
            (median(self.sizes[i] for i in x), median(self.lasts_s[i] for i in x)) for x in halves
        )
        if large[0] < _APART * small[0] and large[0] < _RATE_BYTES:
            return None
        return AlphaBetaCost.through(small, large)

    def end_s(self, ready_s: Sequence[float], lasts_s: Sequence[float]) -> float:
        """Return the time at which the last of these buckets arrives."""
        return replay(ready_s, [Wire(0.0, x, x) for x in lasts_s], self.backward_s).end_s


def hiding(run: Run, table: StepTable) -> tuple[Remedy, ...]:
    """Return ways to hide more communication, with predicted steps, shortest first; none if buckets are unknown."""
    link = _link_of(run)
    if link is None:
        return ()
    now_s = link.end_s(link.ready_s, link.lasts_s)
    found = [("pass overlap_forward=True", _gained_by_overlap_s(link))]
    cost = link.cost
    if cost is not None:
        halved_s = [
            max(0.0, x - cost.s_per_byte * size / 2) for x, size in zip(link.lasts_s, link.sizes, strict=True)
        ]
        found += [
            ('pass compression="bf16"', now_s - link.end_s(link.ready_s, halved_s)),
            _larger_buckets(link, cost, now_s),
        ]
    worth = [(words, gain_s) for words, gain_s in found if gain_s > _WORTH_GAIN * table.step_s]
    worth.sort(key=lambda item: -item[1])
    return tuple(Remedy(words, shorter_by(table, gain_s)) for words, gain_s in worth)


def _larger_buckets(link: _Link, cost: AlphaBetaCost, now_s: float) -> tuple[str, float]:
    """Return how many neighbours to make one bucket for the shortest step, and what that gains."""
    best, together = (0.0, 0.0), 2
    while together < 2 * len(link.sizes):
        starts = range(0, len(link.sizes), together)
        sizes = [sum(link.sizes[i : i + together]) for i in starts]
        ready_s = [max(link.ready_s[i : i + together]) for i in starts]
        gain_s = now_s - link.end_s(ready_s, [cost.of(size) for size in sizes])
        best = max(best, (gain_s, max(sizes) / MEBIBYTE))
        together *= 2
    return f"pass bucket_cap_mb={best[1]:.2g}", best[0]


def _gained_by_overlap_s(link: _Link) -> float:
    pieces = cut(link.sizes, [1] * len(link.sizes))
    step = MeasuredStep(
        tuple(link.ready_s),
        # Forward uses last what backward makes ready first.
        tuple(link.forward_s * max(0.0, 1 - x / link.backward_s) for x in link.ready_s),
        link.backward_s,
        link.forward_s,
        link.end_s(link.ready_s, link.lasts_s),
        sum(link.sizes) / sum(link.lasts_s),
    )
    gain = predict(pieces, plan(pieces, step), step)
    return gain.without_s - gain.with_s


def _link_of(run: Run) -> _Link | None:
    """Return the link of the last steps with equal buckets on all ranks; None for torch's, or too few steps."""
    rows = run.rows()[-64:]
    sizes = [x.size_bytes for x in rows[-1][0].buckets] if rows else []
    alike = [row for row in rows if all([x.size_bytes for x in record.buckets] == sizes for record in row)]
    if len(alike) < _FEWEST_STEPS or not all(sizes) or not sizes:
        return None
    steps = [[_times(record) for record in row] for row in alike]
    if any(times is None for row in steps for times in row):
        return None
    each = [[times for times in row if times is not None] for row in steps]
    number = range(len(sizes))
    return _Link(
        [median(max(x[0][i] for x in row) for row in each) for i in number],
        [max(1e-9, median(min(x[1][i] for x in row) for row in each)) for i in number],
        sizes,
        max(1e-9, median(max(x[2] for x in row) for row in each)),
        median(max(x[3] for x in row) for row in each),
    )


def _times(record: StepRecord) -> tuple[list[float], list[float], float, float] | None:
    """Return when a rank's buckets were ready, how long under way, its backward and forward; None if unknown."""
    began = [x for x in record.intervals if x.phase == "backward"]
    if not began:
        return None
    start_s, free_s, ready_s, lasts_s = began[-1].start_s, 0.0, [], []
    for bucket in sorted(record.buckets, key=lambda x: x.index):
        if bucket.done_s > record.ended_s + 1e-3:
            return None  # the next forward hides it already
        ready_s.append(max(0.0, bucket.ready_s - start_s))
        lasts_s.append(bucket.done_s - max(bucket.launched_s, min(free_s, bucket.done_s)))
        free_s = max(free_s, bucket.done_s)
    forward_s = sum(x.end_s - x.start_s for x in record.intervals if x.phase == "forward")
    return ready_s, lasts_s, record.work_ended_s - start_s, forward_s


_SLOW_CORE = {"throttled", "stolen", "core shared", "computes longer"}
"""Fewer samples help against these; a wait of so many milliseconds stays as it is."""
SLOWS_ALL = {"throttled", "stolen", "core shared"}
"""A process has these in all that it does, in its part of collectives as well."""
_PER_SAMPLE = frozenset({"forward", "backward"})
_WORTH_LEFT = 0.97  # of a step: a remedy that is predicted to leave more is not named


@dataclass(frozen=True)
class Remedy:
    """An action that shortens steps, with the predicted step."""

    words: str  # in the imperative, without a full stop
    predicted: Prediction | None  # the step after it; None: not predicted


_OF_CAUSE = {
    "throttled": "Raise its CPU quota",
    "stolen": "Move it to a host that is not oversubscribed",
    "swap": "Give its host more memory, or the job less to keep",
    "disk": "Keep what it reads in memory, or on a faster disk",
    "core shared": "Keep other processes off its cores",
    "garbage collection": "Call gc.freeze() before training, and gc.collect() on all ranks in the same step",
    "checkpoint": "Write checkpoints in a thread, or on all ranks in the same step",
    "loader": "Give its DataLoader more workers",
    "more tokens": "Deal samples by tokens (paceline.data.TokenShuffle)",
    "more samples": "Deal equal shares to all ranks",
    "computes longer": "Look at what is different about its cores",
    "waits": "Look at what it waits for there",
}


def remedies_of(run: Run, table: StepTable, culprit: Culprit, cause: Cause) -> tuple[Remedy, ...]:
    """Return remedies for a late rank: what removes the cause, and shares by speed where nothing else helps."""
    left = table
    if cause.kind == "core shared":  # processes slow other ranks, too
        left = table.with_shorter_waits(waits_for_processes(run, table))
    removed = without(left, culprit, slows_all=cause.kind in SLOWS_ALL)
    found = [Remedy(_OF_CAUSE[cause.kind], removed)]
    is_lasting = culprit.when in {"always", "since"}
    if is_lasting and culprit.phase in COMPUTES and cause.kind in _SLOW_CORE:
        balanced = _balanced(table, culprit.indices[0])
        if balanced is not None and balanced.step_s < _WORTH_LEFT * table.step_s:
            found.append(Remedy('pass balance="auto"', balanced))
    return tuple(found)


def _balanced(table: StepTable, first: int) -> Prediction | None:
    """Predict a step with shares by speed, from each rank's median time per sample and fixed time."""
    rows = table.rows[first:]
    speeds, works = [], []
    for place in range(len(table.ranks)):
        computing_s = median(phases_s(row[place], _PER_SAMPLE) for row in rows)
        work_s = median(row[place].work_s for row in rows)
        if computing_s <= 0:
            return None
        speeds.append(Speed(work_s - computing_s, computing_s))
        works.append(work_s)
    least_s = lower_bound_s(speeds, len(speeds))  # one share a rank now
    return with_work(table, {place: least_s / work_s for place, work_s in enumerate(works)})


def remedies_of_waiting(run: Run, table: StepTable) -> tuple[Remedy, ...]:
    """Return remedies for exposed communication, shortest step first; without records of buckets what may help."""
    if any(x.header.wrapper == "torch" for x in run.ranks):
        return (Remedy("use paceline.DistributedDataParallel with overlap_forward=True", None),)
    return hiding(run, table)


def remedies_of_link(run: Run, table: StepTable, link: SlowLink) -> tuple[Remedy, ...]:
    """Return remedies for a slow link: the step at the others' rate, and what leaves less to wait for."""
    if exposed_s(table) <= 0:
        return ()
    if link.kind == "rate":
        repaired = with_wire(run, table, link.step_bytes / link.others)
        halved = Remedy('pass compression="bf16"', with_wire(run, table, link.step_bytes / link.value / 2))
        hidden = remedies_of_waiting(run, table)
        return (
            Remedy("Repair its link", repaired),
            *(hidden if hidden and hidden[0].predicted else (halved, *hidden)),
        )
    if link.kind == "loss":
        return (
            Remedy("Look for errors on its link (ip -s link)", None),
            Remedy("pass reduction=BoundedLoss(bound=0), which resends over UDP", None),
        )
    return (Remedy("Move the host closer, or use fewer and larger buckets", None),)


def scored(before: Diagnosis, now: Diagnosis) -> tuple[str, ...]:
    """Compare what an earlier run's remedies predicted with the step measured since; nothing if either is unknown."""
    remedies = [*(before.finding.remedies if before.finding else ()), *before.remedies]
    if not now.step_s or not before.step_s:
        return ()
    return (
        f"A step takes {ms(now.step_s)}, and {ms(before.step_s)} in the run before.",
        *(
            f"{x.words[0].upper()}{x.words[1:]}: predicted {ms(x.predicted.step_s)}, "
            f"{x.predicted.step_s / now.step_s - 1:+.1%} from this run's step."
            for x in remedies
            if x.predicted is not None
        ),
    )
