"""What a study found: tables, verdicts, a picture, and everything behind them as JSON."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.bench.protocol.provenance import collect
from paceline.bench.protocol.report import Report, figure_path
from paceline.bench.studies.chart import Line, Panel, draw_panels
from paceline.report import table
from paceline.study.claims import Verdict, judge
from paceline.study.plan import Cell
from paceline.study.results import RULE, TUNED, Results
from paceline.study.rows import BATCHES, CODEC_FACTOR, CODECS, LOCAL

_PROTOCOL = (
    "rates are chosen on a validation set; accuracies are of the test set, mean ± standard deviation over {num_seeds} "
    "seeds"
)
_COLORS = [
    f"tab:{name}" for name in ("gray", "olive", "red", "orange", "blue", "green", "purple", "cyan", "brown")
]


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
    title = f"{results.plan.task.title}: test accuracy %, by global batch"
    console.print(table(title, report.columns, report.rows))
    for name, (columns, rows) in (
        ("rates tuned in each cell", results.batch_table(TUNED)),
        ("messages", results.message_table()),
    ):
        if rows:
            console.print(table(name, columns, rows))
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
    factors = (1, *results.plan.factors) if mode == RULE else results.plan.tuned_factors
    lines = []
    for row, color in zip((r for r in results.plan.rows if r.table == BATCHES), _COLORS, strict=False):
        spreads = [(factor, results.spread(Cell(row, factor), mode)) for factor in factors]
        points = [(float(factor), spread.mean) for factor, spread in spreads if spread is not None]
        if points:
            lines.append(Line(row.name, points, color))
    return Panel(
        f"rates {mode}", "global batch / reference batch", "test accuracy %", lines, factors, from_zero=False
    )


def _over_bytes(results: Results) -> Panel:
    lines = []
    for name, color, style in ((CODECS, "tab:blue", ""), (LOCAL, "tab:green", "-")):
        points = []
        for row in results.plan.rows:
            spread = results.spread(Cell(row, CODEC_FACTOR)) if row.table == name else None
            if spread is not None:
                points.append((results.sent_bytes(Cell(row, CODEC_FACTOR)) / 1e3, spread.mean))
        if points:
            lines.append(Line(name, sorted(points), color, style))
    ticks = sorted({round(x, 1) for line in lines for x, _ in line.points})
    return Panel(
        f"{CODEC_FACTOR} ranks", "kB sent by a rank a step", "test accuracy %", lines, ticks, from_zero=False
    )


def _record(verdict: Verdict) -> dict[str, Any]:
    return {**asdict(verdict), "summary": verdict.summary}
