"""Remedies that hide or shorten exposed communication, each with the step that it is predicted to give.

The buckets of Paceline's reducer say when each was ready and how long it was under way. So a step's link can be played
again: with other buckets, with half the bytes, or hidden by the next forward as well. Torch's reducer says neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from paceline.diagnosis.step_table import StepTable
from paceline.diagnosis.what_if import Prediction, shorter_by
from paceline.observe.run_reading import Run
from paceline.planning.bucket_assignment import MEBIBYTE
from paceline.planning.forward_overlap import MeasuredStep, cut, plan, predict
from paceline.planning.replay import AlphaBetaCost, Wire, replay

if TYPE_CHECKING:
    from paceline.observe.run_records import StepRecord

_FEWEST_STEPS = 12
_APART = 1.2  # sizes that say what of a bucket's time is fixed
_RATE_BYTES = 2**20  # of buckets that are alike: from here on nothing is
_WORTH = 0.03  # of a step: what is predicted to gain less is not named


@dataclass(frozen=True)
class _Link:
    """A median step as the link sees it; of ranks the last one counts, and of waits the shortest."""

    ready_s: list[float]  # of each bucket, since backward began on the last rank
    lasts_s: list[float]  # under way
    sizes: list[int]  # bytes
    backward_s: float
    forward_s: float

    @property
    def cost(self) -> AlphaBetaCost | None:
        """Seconds for bytes, through the smaller and the larger half of the buckets; None: alike, and small."""
        order = sorted(range(len(self.sizes)), key=self.sizes.__getitem__)
        halves = [order[: (len(order) + 1) // 2], order[len(order) // 2 :]]
        small, large = (
            (median(self.sizes[i] for i in x), median(self.lasts_s[i] for i in x)) for x in halves
        )
        if large[0] < _APART * small[0] and large[0] < _RATE_BYTES:
            return None
        return AlphaBetaCost.through(small, large)

    def end_s(self, ready_s: Sequence[float], lasts_s: Sequence[float]) -> float:
        """Return when the last of these buckets is there."""
        return replay(ready_s, [Wire(0.0, x, x) for x in lasts_s], self.backward_s).end_s


def hiding(run: Run, table: StepTable) -> tuple[tuple[str, Prediction], ...]:
    """Words and predicted steps, shortest first, of what leaves less exposed; nothing where buckets are unknown."""
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
    worth = [(words, gain_s) for words, gain_s in found if gain_s > _WORTH * table.step_s]
    return tuple(
        (words, shorter_by(table, gain_s)) for words, gain_s in sorted(worth, key=lambda item: -item[1])
    )


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
