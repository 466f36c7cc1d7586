"""A table of a run's steps: where each rank's own work went, from the end of its last backward.

No common clock is needed. All ranks leave a backward at almost the same moment. So each measures from there to its own
last gradient, and the others wait for the rank with most work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from paceline.observe.run_reading import RankRun, Run
from paceline.observe.run_records import HostFacts, StepRecord

_WARM_UP = 3
"""Steps at a run's beginning that do not count: buckets are cut anew, caches are cold."""
_INNER = ("garbage", "recording", "waiting", "checkpoint")
_LONGEST_WINDOW = 400
Part = tuple[str, str]
"""A phase, and the layer if it is a part of the backward."""


@dataclass(frozen=True)
class RankStep:
    """The work of one rank in one step."""

    parts: dict[Part, float]  # seconds of its work by phase and layer
    work_s: float  # their sum, up to its own last gradient
    step_s: float  # with waiting for the others
    host: HostFacts  # what the kernel says
    num_samples: int | None = None  # trained; None: not known
    num_tokens: int | None = None  # trained; None: not known


@dataclass(frozen=True)
class StepTable:
    """Steps that all ranks have recorded."""

    ranks: tuple[int, ...]  # which; the order of the columns
    steps: tuple[int, ...]  # their numbers
    rows: tuple[tuple[RankStep, ...], ...]  # of each step a `RankStep` a rank

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def step_s(self) -> float:
        return median(self.steps_s)

    @property
    def steps_s(self) -> list[float]:
        """Return the duration of each step: the median of the ranks, which leave collectives at different times."""
        return [median(rank.step_s for rank in row) for row in self.rows]

    def leads_s(self) -> list[list[float]]:
        """Return by how much each rank's work is longer than the longest of the others, for each step."""
        found = []
        for row in self.rows:
            works = [rank.work_s for rank in row]
            found.append([work - max(_others(works, place)) for place, work in enumerate(works)])
        return found

    def without_queueing(self) -> StepTable:
        """Return the table without waits for a core, except throttling. Chance decides which rank waits longest."""

        def alone(rank: RankStep) -> RankStep:
            waited_s = max(0.0, rank.host.queued_s - rank.host.throttled_s)
            host = replace(rank.host, queued_s=rank.host.throttled_s)
            return replace(rank, work_s=max(0.0, rank.work_s - waited_s), host=host)

        return replace(self, rows=tuple(tuple(map(alone, row)) for row in self.rows))

    def with_shorter_waits(self, ratios: Sequence[float]) -> StepTable:
        """Return the table with shorter waits for cores, by column; parts shrink alike, and what is exposed stays."""

        def shorter(row: tuple[RankStep, ...]) -> tuple[RankStep, ...]:
            left = [
                max(0.0, 1 - ratio * max(0.0, x.host.queued_s - x.host.throttled_s) / max(x.work_s, 1e-9))
                for ratio, x in zip(ratios, row, strict=True)
            ]
            works = [x.work_s * kept for x, kept in zip(row, left, strict=True)]
            gone_s = max(x.work_s for x in row) - max(works)
            return tuple(
                replace(
                    x,
                    parts={part: kept * seconds for part, seconds in x.parts.items()},
                    work_s=work_s,
                    step_s=x.step_s - gone_s,
                )
                for x, kept, work_s in zip(row, left, works, strict=True)
            )

        return replace(self, rows=tuple(map(shorter, self.rows)))

    def excess_s(self, index: int, place: int) -> dict[Part, float]:
        """Return by how much each part of a rank's work in a step is longer than the median of the others'."""
        row = self.rows[index]
        parts = set().union(*(rank.parts for rank in row))
        return {
            part: row[place].parts.get(part, 0.0)
            - median(_others([rank.parts.get(part, 0.0) for rank in row], place))
            for part in parts
        }

    def more_than_others(self, index: int, place: int, value: Callable[[RankStep], float]) -> float:
        """Return a rank's value less the median of the others', in one step."""
        values = [value(rank) for rank in self.rows[index]]
        return values[place] - median(_others(values, place))


def _others(values: Sequence[float], place: int) -> list[float]:
    return [value for other, value in enumerate(values) if other != place]


def table_of(run: Run) -> StepTable:
    """Return the last steps that all ranks of a run recorded, without the first steps of the run."""
    ranks = tuple(rank.header.rank for rank in run.ranks)
    hosts = [_host_facts(rank) for rank in run.ranks]
    rows = [row for row in run.rows() if row[0].step > _WARM_UP][-_LONGEST_WINDOW:]
    return StepTable(
        ranks,
        tuple(row[0].step for row in rows),
        tuple(
            tuple(
                _rank_step(record, rank, host[record.step])
                for record, rank, host in zip(row, run.ranks, hosts, strict=True)
            )
            for row in rows
        ),
    )


def _host_facts(rank: RankRun) -> dict[int, HostFacts]:
    """Return the facts of each step: its own, or the next step's that has some, which are the average of both."""
    found, facts = {}, HostFacts()
    for record in reversed(rank.steps):
        facts = record.host or facts
        found[record.step] = facts
    return found


def _rank_step(record: StepRecord, rank: RankRun, host: HostFacts) -> RankStep:
    return RankStep(
        _parts(record, rank.labels), record.work_s, record.step_s, host, record.num_samples, record.num_tokens
    )


def _parts(record: StepRecord, labels: Sequence[str]) -> dict[Part, float]:
    """Return where a rank's work went; what lies within another phase is taken out of that one."""
    began_s, ended_s = record.began_s, record.work_ended_s
    inner = [x for x in record.intervals if x.phase in _INNER]
    found: dict[Part, float] = {}

    def add(part: Part, start_s: float, end_s: float) -> None:
        start_s, end_s = max(start_s, began_s), min(end_s, ended_s)
        if end_s > start_s:
            within_s = sum(max(0.0, min(end_s, x.end_s) - max(start_s, x.start_s)) for x in inner)
            found[part] = found.get(part, 0.0) + max(0.0, end_s - start_s - within_s)

    for x in inner:
        length_s = max(0.0, min(x.end_s, ended_s) - max(x.start_s, began_s))
        found[x.phase, ""] = found.get((x.phase, ""), 0.0) + length_s
    outer = [x for x in record.intervals if x.phase not in _INNER]
    for x in outer:
        if x.phase != "backward":
            add((x.phase, ""), x.start_s, x.end_s)
            continue
        start_s = x.start_s  # an interval belongs to the gradient that ends it
        for index, at_s in record.gradient_marks:
            if start_s < at_s <= x.end_s:
                add(("backward", labels[index] if index < len(labels) else ""), start_s, at_s)
                start_s = at_s
        add(("backward", ""), start_s, x.end_s)
    at_s = began_s  # time in no phase
    for x in sorted(outer, key=lambda x: x.start_s):
        add(("other", ""), at_s, x.start_s)
        at_s = max(at_s, x.end_s)
    add(("other", ""), at_s, ended_s)
    found.pop(("waiting", ""), None)  # others prolong it
    return found
