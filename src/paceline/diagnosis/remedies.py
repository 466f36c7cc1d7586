"""Remedies, each with the predicted step; None where the records do not say it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import starmap
from statistics import median
from typing import TYPE_CHECKING

from paceline.diagnosis.causes import Cause
from paceline.diagnosis.communication import hiding
from paceline.diagnosis.core_sharing import waits_for_processes
from paceline.diagnosis.culprit import Culprit
from paceline.diagnosis.links import SlowLink
from paceline.diagnosis.step_table import RankStep, StepTable
from paceline.diagnosis.what_if import Prediction, exposed_s, with_wire, with_work, without
from paceline.observe.run_reading import Run
from paceline.planning.shares import Speed, lower_bound_s
from paceline.quantities import ms

if TYPE_CHECKING:
    from paceline.diagnosis.findings import Diagnosis

_COMPUTES = {"forward", "backward", "computation", "other"}
_SLOW_CORE = {"throttled", "stolen", "core shared", "computes longer"}
"""Fewer samples help against these; a wait of so many milliseconds stays as it is."""
SLOWS_ALL = {"throttled", "stolen", "core shared"}
"""A process has these in all that it does, in its part of collectives as well."""
_PER_SAMPLE = ("forward", "backward")
_WORTH = 0.97  # of a step: a remedy that is predicted to leave more is not named


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


def remedies_of(run: Run, table: StepTable, culprit: Culprit, cause: Cause) -> tuple[Remedy, ...]:
    """Return remedies for a late rank: what removes the cause, and shares by speed where nothing else helps."""
    left = table
    if cause.kind == "core shared":  # processes slow other ranks, too
        left = table.with_shorter_waits(waits_for_processes(run, table))
    removed = without(left, culprit, slows_all=cause.kind in SLOWS_ALL)
    found = [Remedy(_OF_CAUSE[cause.kind], removed)]
    is_lasting = culprit.when in {"always", "since"}
    if is_lasting and culprit.phase in _COMPUTES and cause.kind in _SLOW_CORE:
        balanced = _balanced(table, culprit.indices[0])
        if balanced is not None and balanced.step_s < _WORTH * table.step_s:
            found.append(Remedy('pass balance="auto"', balanced))
    return tuple(found)


def _balanced(table: StepTable, first: int) -> Prediction | None:
    """Predict a step with shares by speed, from the time per sample and the fixed time of each rank, in the median."""
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


def remedies_of_waiting(run: Run, table: StepTable) -> tuple[Remedy, ...]:
    """Return remedies for exposed communication, shortest step first; without records of buckets what may help."""
    if any(x.header.wrapper == "torch" for x in run.ranks):
        return (Remedy("use paceline.DistributedDataParallel with overlap_forward=True", None),)
    return tuple(starmap(Remedy, hiding(run, table)))


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
