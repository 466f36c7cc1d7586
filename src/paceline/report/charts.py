"""The page's pictures: where a step goes on each rank, steps over time, and the longest one on one clock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

from paceline.diagnosis.step_table import StepTable
from paceline.observe.run_reading import ClockOffset, Run, clock_offsets
from paceline.observe.run_records import StepRecord
from paceline.quantities import ms
from paceline.report.markup import (
    ORDER,
    Span,
    curve,
    legend,
    row_of,
    rows_of,
    strip,
    table_of_cells,
    words_of,
)

_MOST_RANKS = 64
_MOST_POINTS = 1000


def phases(run: Run) -> str:
    """Draw the medians of every phase, stacked, for each rank."""
    shown = run.ranks[:_MOST_RANKS]
    medians = {rank.header.rank: medians_of(rank.steps) for rank in shown}
    scale = max((sum(phases.values()) for phases in medians.values()), default=0.0)
    if not scale:
        return ""
    rows = []
    for rank in shown:
        number, spans, at = rank.header.rank, [], 0.0
        for name in ORDER:
            length = medians[number].get(name, 0.0)
            if length > 0:
                spans.append(Span(at, at + length, name, f"{words_of(name)}: {ms(length)}"))
                at += length
        label = f"rank {number}: " + ", ".join(span.title for span in spans)
        rows.append(row_of(f"rank {number}", strip(spans, scale, label=label), ms(at)))
    names = [
        name for name in ORDER if any(phases.get(name, 0.0) > 0.002 * scale for phases in medians.values())
    ]
    cells = [[f"rank {x}", *(ms(medians[x].get(name, 0.0)) for name in names)] for x in medians]
    more = (
        f"<p class='soft'>{len(run.ranks) - len(shown)} more ranks are left out here.</p>"
        if run.ranks[_MOST_RANKS:]
        else ""
    )
    return (
        "<h2>Where a step goes, by rank</h2><p class='soft'>Medians. A rank that hardly waits is the one that others "
        f"wait for.</p>{rows_of(rows)}{legend(names)}{more}"
        f"<details><summary>As numbers</summary>{table_of_cells(('', *map(words_of, names)), cells)}</details>"
    )


def medians_of(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Return the median of each phase; the first steps do not count where there are others."""
    phases = [step.phases_s() for step in steps[3:] or steps]
    return {name: median(each.get(name, 0.0) for each in phases) for name in ORDER} if phases else {}


def over_time(table: StepTable) -> str:
    """The step's length over the run."""
    steps_s = table.steps_s
    if len(steps_s) < 2:
        return ""
    stride = math.ceil(len(steps_s) / _MOST_POINTS)
    shown = [max(steps_s[place : place + stride]) for place in range(0, len(steps_s), stride)]  # peaks stay
    top = max(shown) * 1.05
    worst = max(range(len(steps_s)), key=steps_s.__getitem__)
    label = f"length of {len(steps_s)} steps, {ms(min(steps_s))} to {ms(max(steps_s))}"
    return (
        f"<h2>Steps over time</h2>{_axis(ms(top), f'dashed: step {table.steps[worst]}, the longest')}"
        f"{curve(shown, top, [worst // stride], label)}"
        f"{_axis(f'step {table.steps[0]}', f'step {table.steps[-1]}')}"
    )


def longest(run: Run) -> str:
    """The longest step's timeline, on one clock."""
    rows = [row for row in run.rows() if row[0].step > 3] or run.rows()
    row = max(rows, key=lambda row: median(step.step_s for step in row))
    clocks = clock_offsets(run)
    numbers = [rank.header.rank for rank in run.ranks]

    def at_s(place: int, time_s: float) -> float:
        return clocks[numbers[place]].aligned_s(time_s)

    zero_s = min(at_s(place, step.began_s) for place, step in enumerate(row))
    scale = max(at_s(place, step.ended_s) for place, step in enumerate(row)) - zero_s
    ends = [at_s(place, step.work_ended_s) for place, step in enumerate(row)]
    last = max(range(len(row)), key=ends.__getitem__)
    cells, names = [], {"sent"} if any(step.buckets for step in row) else set()
    for place, step in list(enumerate(row))[:_MOST_RANKS]:
        spans = _timeline(step, at_s(place, step.began_s) - zero_s, names)
        placed = [span for span in spans if span.end > span.start]
        sent = [
            Span(
                at_s(place, x.launched_s) - zero_s,
                at_s(place, x.done_s) - zero_s,
                "sent",
                f"bucket {x.index}, {x.size_bytes / 2**20:.2f} MiB",
            )
            for x in step.buckets
        ]
        mark = " last" if place == last else ""
        title = f"rank {numbers[place]}" + (", last" if place == last else "")
        drawn = strip(placed, scale, label=f"{title}: {', '.join(span.title for span in placed)}")
        drawn += strip(sent, scale, "thin", f"{len(sent)} buckets on the way") if sent else ""
        cells.append(row_of(title, drawn, ms(step.step_s), mark))
    axis = f"<span></span>{_axis('0', ms(scale / 2), ms(scale))}<span></span>"
    about = _who_was_last(row, ends, numbers) + _off(clocks.values())
    return (
        f"<h2>The longest step: {row[0].step}</h2><p class='soft'>{about}</p>"
        f"{rows_of([*cells, axis])}{legend(x for x in (*ORDER, 'sent') if x in names)}"
    )


def _who_was_last(row: Sequence[StepRecord], ends_s: Sequence[float], ranks: Sequence[int]) -> str:
    """Return how much of the waiting is one rank's doing, and how much communication's."""
    exposed = f"Then every rank waited at least {ms(max(0.0, min(step.waited_s for step in row)))} for communication."
    if len(row) < 2:
        return exposed
    *_, second, last = sorted(range(len(row)), key=ends_s.__getitem__)
    lead_s = ends_s[last] - ends_s[second]
    return f"Rank {ranks[last]} had its last gradient {ms(lead_s)} after rank {ranks[second]}. {exposed}"


def _axis(*labels: str) -> str:
    return f"<div class='axis'>{''.join(f'<span>{label}</span>' for label in labels)}</div>"


def _off(clocks: Iterable[ClockOffset]) -> str:
    """Return how well the ranks' clocks are aligned, where they are several."""
    error_s = max((clock.error_s for clock in clocks), default=0.0)
    if not math.isfinite(error_s):
        return " The hosts' clocks could not be aligned."
    return f" Clocks of different hosts are aligned, and may be off by {ms(error_s)}." if error_s else ""


def _timeline(step: StepRecord, at_s: float, names: set[str]) -> Iterable[Span]:
    """Yield the spans of a rank's step that begins at `at_s`; add their names to `names`."""
    for name, start_s, end_s in step.spans():
        names.add(name)
        inset = name in ("garbage", "recording", "checkpoint")
        yield Span(
            at_s + max(start_s, step.began_s) - step.began_s,
            at_s + min(end_s, step.ended_s) - step.began_s,
            name if name in ORDER else "other",
            f"{words_of(name)}: {ms(end_s - start_s)}",
            inset,
        )
