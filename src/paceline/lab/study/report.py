"""What a study found: tables, verdicts, a picture, and everything behind them as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.lab.bench.provenance import collect
from paceline.lab.report import table
from paceline.lab.report.figures import ROW_COLORS, Line, Panel, draw_panels
from paceline.lab.report.publication import Report, figure_path
from paceline.lab.study.claims import Verdict, judge
from paceline.lab.study.plan import Cell
from paceline.lab.study.results import RULE, TUNED, Results
from paceline.lab.study.rows import BASELINE, BATCHES, CODEC_FACTOR, LOCAL

_PROTOCOL = (
    "rates are chosen on a validation set; accuracies are of the test set, mean ± standard deviation over {num_seeds} "
    "seeds, or those that are there"
)
_SHOWN_SHARE = 0.75  # of the baseline's accuracy: the bottom of the picture


def make_report(results: Results, load_average_before: float, num_missing: int) -> Report:
    """Gather what is known; `num_missing` trials are not there yet, at least."""
    plan, verdicts = results.plan, judge(results)
    columns, rows = results.batch_table(RULE)
    baseline = results.baseline()
    task, rate = plan.task, results.rate(plan.references()[0], RULE)
    reference = f"{baseline} at {rate:g}" if baseline else "not there yet"
    notes = [
        f"{task.title}: {task.num_train:,} samples, {task.epochs} epochs at any batch",
        f"each rank has {task.rank_batch} samples a step; small batch, one rank: {reference}",
        _PROTOCOL.format(num_seeds=plan.num_seeds),
        "ranks are in one process, one after another, with the library's reductions between them",
    ]
    if num_missing:
        notes.append(f"not complete: at least {num_missing} trials are missing; the same command goes on")
    return Report(
        name=f"large-batch-{plan.task.name}",
        question="What does a larger global batch, or a shorter message, cost in accuracy?",
        columns=tuple(columns),
        rows=tuple(tuple(row) for row in rows),
        verdicts=(),
        notes=tuple(notes),
        config={
            "task": plan.task.name,
            "rows": [row.name for row in plan.rows],
            "factors": plan.factors,
            "tuned_factors": plan.tuned_factors,
            "num_seeds": plan.num_seeds,
            "grid": plan.grid,
            "middle_rates": dict(plan.task.middle_rates),
        },
        summaries={
            "tuned": results.batch_table(TUNED),
            "messages": results.message_table(),
            "claims": [_record(verdict) for verdict in verdicts],
        },
        samples={"trials": [asdict(trial) | asdict(outcome) for trial, outcome in results.used()]},
        provenance=collect(1, load_average_before),
    )


def show(results: Results, report: Report, console: Console) -> None:
    """Print tables and verdicts."""
    tables = (
        (f"{results.plan.task.title}: test accuracy %, by global batch", report.columns, report.rows),
        ("Rates tuned in each case", *results.batch_table(TUNED)),
        ("Messages", *results.message_table()),
    )
    for title, columns, rows in tables:
        if rows:
            console.print(
                title, highlight=False, soft_wrap=True
            )  # as a table's title it would wrap with the table
            console.print(table("", columns, rows))
    for verdict in judge(results):
        for line in verdict.lines():
            console.print(line, highlight=False, soft_wrap=True)
    for note in report.notes:
        console.print(f"note   {note}", highlight=False, soft_wrap=True)


def draw(results: Results, report: Report, folder: Path) -> bool:
    """Draw accuracy over batch, by the rule and tuned, and over bytes; says whether it was drawn."""
    panels = [_over_batch(results, mode) for mode in (RULE, TUNED)] + [_over_bytes(results)]
    drawn = [panel for panel in panels if panel.lines]
    return bool(drawn) and draw_panels(figure_path(report, folder), results.plan.task.title, drawn)


def _over_batch(results: Results, mode: str) -> Panel:
    factors = [f for f in (results.plan.factors if mode == RULE else results.plan.tuned_factors) if f > 1]
    lines = []
    rows = [row for row in results.plan.rows if row.table == BATCHES and row.name != BASELINE]
    for row, color in zip(rows, ROW_COLORS, strict=False):
        spreads = [(factor, results.spread(Cell(row, factor), mode)) for factor in factors]
        points = [(float(factor), spread.mean) for factor, spread in spreads if spread is not None]
        if points:
            lines.append(Line(row.name, points, color))
    baseline = results.baseline()
    if lines and baseline is not None:
        lines.append(Line(BASELINE, [(float(f), baseline.mean) for f in factors], "tab:gray", "--", ""))
    return _panel(results, f"rates {mode}", "global batch / reference batch", lines, factors)


def _over_bytes(results: Results) -> Panel:
    lines, steps = [], []
    colors = iter(ROW_COLORS)
    for row in results.plan.rows:
        cell = Cell(row, CODEC_FACTOR)
        spread = None if row.table == BATCHES else results.spread(cell, TUNED) or results.spread(cell)
        if spread is None:
            continue
        point = results.sent_bytes(cell) / 1e3, spread.mean
        if row.table == LOCAL:
            steps.append(point)
        else:
            lines.append(Line(row.name, [point], next(colors), ""))
    if steps:
        lines.append(Line("local steps, from 1 on the right", steps, "black", ":", "."))
    xs = [x for line in lines for x, _ in line.points]
    ticks = [2.0**n for n in range(24) if xs and min(xs) / 2 < 2.0**n < 2 * max(xs)]
    return _panel(results, f"{CODEC_FACTOR} ranks", "kB sent by a rank a step", lines, ticks)


def _panel(results: Results, title: str, x_label: str, lines: list[Line], ticks: Sequence[float]) -> Panel:
    """Diverged runs leave the picture at the bottom, so that the others can be told apart."""
    baseline = results.baseline()
    bottom = None if baseline is None else _SHOWN_SHARE * baseline.mean
    return Panel(title, x_label, "test accuracy %", lines, ticks, from_zero=False, bottom=bottom)


def _record(verdict: Verdict) -> dict[str, Any]:
    return {**asdict(verdict), "summary": verdict.summary}
