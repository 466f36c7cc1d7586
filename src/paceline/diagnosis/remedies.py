"""What would help, and what a step is then predicted to take; None where nothing recorded says it."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from paceline.diagnosis.causes import Cause
from paceline.diagnosis.culprit import Culprit
from paceline.diagnosis.links import SlowLink
from paceline.diagnosis.step_table import RankStep, StepTable
from paceline.diagnosis.what_if import Prediction, exposed_s, with_exposed, with_work, without
from paceline.planning.shares import Speed, lower_bound_s

_COMPUTES = {"forward", "backward", "computation", "other"}
_SLOW_CORE = {"throttled", "stolen", "core shared", "computes longer"}
"""Fewer samples help against these; a wait of so many milliseconds stays as it is."""
_PER_SAMPLE = ("forward", "backward")
_WORTH = 0.97  # of a step: a remedy that is predicted to leave more is not named
_HALF_RATIO = 0.5  # of the exposed communication that bf16 leaves where the link's rate limits


@dataclass(frozen=True)
class Remedy:
    """Something to do."""

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


def remedies_of(table: StepTable, culprit: Culprit, cause: Cause) -> tuple[Remedy, ...]:
    """For a late rank: what removes the cause, and shares by speed where these help and others do not."""
    removed = without(table, culprit)
    found = [Remedy(_OF_CAUSE[cause.kind], removed)]
    is_lasting = culprit.when in {"always", "since"}
    if is_lasting and culprit.phase in _COMPUTES and cause.kind in _SLOW_CORE:
        balanced = _balanced(table, culprit.indices[0])
        if balanced is not None and balanced.step_s < _WORTH * table.step_s:
            found.append(Remedy('pass balance="auto"', balanced))
    return tuple(found)


def _balanced(table: StepTable, first: int) -> Prediction | None:
    """With shares by speed: what computing a sample takes on each rank, and what is fixed, in the median."""
    rows = table.rows[first:]
    speeds, works = [], []
    for place in range(len(table.ranks)):
        computing_s = median(_per_sample_s(row[place]) for row in rows)
        work_s = median(row[place].work_s for row in rows)
        if computing_s <= 0:
            return None
        speeds.append(Speed(work_s - computing_s, computing_s))
        works.append(work_s)
    least_s = lower_bound_s(speeds, len(speeds))  # one share a rank now
    return with_work(table, {place: least_s / work_s for place, work_s in enumerate(works)})


def _per_sample_s(rank: RankStep) -> float:
    return sum(seconds for (phase, _), seconds in rank.parts.items() if phase in _PER_SAMPLE)


def remedies_of_link(table: StepTable, link: SlowLink) -> tuple[Remedy, ...]:
    """For a slow link: what it would be at the others' rate, and half the bytes."""
    if exposed_s(table) <= 0:
        return ()
    halved = Remedy('pass compression="bf16"', with_exposed(table, _HALF_RATIO))
    if link.kind == "rate":
        repaired = with_exposed(table, min(1.0, link.value / link.others))
        return (Remedy("Repair its link", repaired), halved)
    if link.kind == "loss":
        return (
            Remedy("Look for errors on its link (ip -s link)", None),
            Remedy("PACELINE_BETWEEN_HOSTS=udp", None),
        )
    return (Remedy("Move the host closer, or use fewer and larger buckets", None),)
