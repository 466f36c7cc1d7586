"""Prediction of a step without the culprit: the recorded steps are played again, with one rank's work replaced.

A step ends when the last rank's work does, and then what was exposed of communication. In the replay, the guilty phases
of the culprit take what another rank took for them in the same step, drawn at random. So the culprit keeps the jitter
that others have. With the others' median in its place, predictions were 2 to 5 % too short (notebook).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from paceline.diagnosis.culprit import Culprit, phases_of
from paceline.diagnosis.step_table import RankStep, StepTable
from paceline.observe.run_reading import RankRun, Run
from paceline.observe.run_records import StepRecord
from paceline.planning.replay import Wire, replay

_DRAWS = 20  # replays of a run
_RESAMPLED = 200  # medians, for the range
# phases with a larger excess are replaced: of the delay, or of the step without it
_GUILTY_RATIO, _GUILTY_STEP_RATIO = 0.1, 0.01
_RECORDING = frozenset({"recording"})


@dataclass(frozen=True)
class Prediction:
    """A predicted step, and the range in which nine of ten medians of as many steps lie."""

    step_s: float  # the median step
    low_s: float  # where the range begins
    high_s: float  # where it ends
    mean_s: float  # the mean step, which is what a delay of few steps changes


def without(table: StepTable, culprit: Culprit, *, slows_all: bool = False) -> Prediction:
    """Predict the step if the culprit's guilty phases took as long as the other ranks'.

    Where something `slows_all` that its process does, its part in collectives is as many times as long as its work.
    Recording takes a share of the time, not of the steps: of shorter ones, less.
    """
    guilty = _guilty(table, culprit)
    recorded = min(1.0, culprit.delay_s / table.step_s) * (len(culprit.indices) / len(table))
    affected = set(culprit.indices)
    chance = random.Random(0)  # noqa: S311  the same answer every time
    steps_s = []
    for _ in range(_DRAWS):
        for index, row in enumerate(table.rows):
            works = {rank: x.work_s - recorded * phases_s(x, _RECORDING) for rank, x in enumerate(row)}
            left = 1.0
            if index in affected:
                place = culprit.places[index]
                other = chance.choice([x for x in range(len(row)) if x != place])
                works[place] += phases_s(row[other], guilty) - phases_s(row[place], guilty)
                left = min(1.0, works[place] / row[place].work_s) if slows_all else 1.0
            steps_s.append(_step_s(row, works, left))
    return _prediction(steps_s, len(table), chance)


def as_recorded(table: StepTable) -> Prediction:
    """Return the steps of a changed table as a prediction, without further changes."""
    return _prediction(table.steps_s, len(table), random.Random(0))  # noqa: S311  as above


def with_work(table: StepTable, work_s: Mapping[int, float]) -> Prediction:
    """Predict the step if each rank's work were so many times as long, by column."""
    steps_s = [
        _step_s(row, {place: x.work_s * work_s[place] for place, x in enumerate(row)}) for row in table.rows
    ]
    return _prediction(steps_s, len(table), random.Random(0))  # noqa: S311  as above


def with_wire(run: Run, table: StepTable, wire_s: float) -> Prediction | None:
    """Predict the step if each bucket took so long on the wire; None: buckets are unknown."""
    steps_s, of_step = [], dict(zip(table.steps, table.rows, strict=True))
    for records in run.rows():
        row = of_step.get(records[0].step)
        if row is None:
            continue
        last = max(range(len(row)), key=lambda place: row[place].work_s)  # whose buckets the others wait for
        ready_s, sizes = _buckets(records[last], run.ranks[last])
        if not sum(sizes):
            return None
        wires = [Wire(0.0, x, x) for x in (wire_s * size / sum(sizes) for size in sizes)]
        steps_s.append(row[last].work_s + replay(ready_s, wires, records[last].work_ended_s).exposed_s)
    return _prediction(steps_s, len(table), random.Random(0))  # noqa: S311  as above


def _buckets(record: StepRecord, rank: RankRun) -> tuple[list[float], list[int]]:
    """Return when each bucket was ready, and its bytes. torch's DDP is assumed to fill them layer after layer."""
    if record.buckets:
        return [x.ready_s for x in record.buckets], [x.size_bytes for x in record.buckets]
    ready_s, sizes, filled = [], [], 0
    for index, at_s in record.gradient_marks if rank.sizes else ():
        filled += rank.sizes[index]
        if filled >= rank.bucket_bytes or index == record.gradient_marks[-1][0]:
            ready_s.append(at_s)
            sizes.append(filled)
            filled = 0
    return ready_s, sizes


def shorter_by(table: StepTable, gain_s: float) -> Prediction:
    """Predict the step if each were so much shorter, at most by its exposed communication."""
    steps_s = [
        now_s - min(gain_s, max(0.0, now_s - max(x.work_s for x in row)))
        for now_s, row in zip(table.steps_s, table.rows, strict=True)
    ]
    return _prediction(steps_s, len(table), random.Random(0))  # noqa: S311  as above


def exposed_s(table: StepTable) -> float:
    """Return the communication that no work hides: the last rank's wait, in the median."""
    return median(median(x.step_s for x in row) - max(x.work_s for x in row) for row in table.rows)


def _guilty(table: StepTable, culprit: Culprit) -> frozenset[str]:
    """Return the guilty phases as a whole, because a delay of all layers is small in each.

    A rank without a core is slow in all that it does. If its delay is many steps long, a tenth of it is a step.
    """
    without_s = max(0.0, table.step_s - culprit.delay_s)
    least_s = min(_GUILTY_RATIO * culprit.delay_s, _GUILTY_STEP_RATIO * without_s)
    return frozenset(phase for phase, x in phases_of(culprit.excess_s).items() if x > least_s)


def phases_s(rank: RankStep, phases: frozenset[str]) -> float:
    """Return the seconds that a rank's work took in these phases."""
    return sum(seconds for (phase, _), seconds in rank.parts.items() if phase in phases)


def _step_s(row: tuple[RankStep, ...], works: Mapping[int, float], left: float = 1.0) -> float:
    """Return the step with a part `left` of the exposed communication, which does not depend on who was last."""
    before_s = max(x.work_s for x in row)
    return left * (median(x.step_s for x in row) - before_s) + max(works.values())


def _prediction(steps_s: list[float], num_steps: int, chance: random.Random) -> Prediction:
    medians = sorted(median(chance.choices(steps_s, k=num_steps)) for _ in range(_RESAMPLED))
    return Prediction(
        median(steps_s), medians[_RESAMPLED // 20], medians[-_RESAMPLED // 20], sum(steps_s) / len(steps_s)
    )
