"""The large-batch study: what a larger global batch, or a shorter or rarer message, costs in accuracy, on real data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from paceline_lab.experiments.accuracy.claims import Verdict, judge
from paceline_lab.experiments.accuracy.large_batch_plan import (
    RULE,
    TUNED,
    TUNED_FACTORS,
    Cell,
    Plan,
    Results,
    quick_plan,
)
from paceline_lab.experiments.accuracy.large_batch_rows import (
    BASELINE,
    BATCHES,
    CODEC_FACTOR,
    LOCAL,
    choose_rows,
)
from paceline_lab.experiments.accuracy.store import Outcome, Store, Trial
from paceline_lab.experiments.accuracy.tasks import TASKS, find_task
from paceline_lab.experiments.accuracy.trial_training import run_trial
from paceline_lab.experiments.options import (
    REPORT_FOLDER,
    AsJson,
    DataFolder,
    OnlyShow,
    ReportFolder,
    StoreFile,
    counts_in,
    names_in,
)
from paceline_lab.experiments.runner import Findings, Measured, Study, keeping, run_study
from paceline_lab.report import table
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import LIMIT, ROW_COLORS
from paceline_lab.report.panels import Bar, Bars, Line, Lines, Panel
from paceline_lab.report.publication import Report
from paceline_lab.report.summary import Spread
from paceline_lab.report.terminal import progress_bar

_PROTOCOL = (
    "rates are chosen on a validation set; accuracies are of the test set, mean ± standard deviation over {num_seeds} "
    "seeds, or those that are there"
)
_SHOWN_SHARE = 0.75  # of the baseline's accuracy: the bottom of the picture


@dataclass(frozen=True)
class LargeBatchStudy(Study[Plan]):
    """Run what a plan is missing, keep each trial as soon as it is finished, and report what there is.

    Attributes:
        file: File of finished trials, which are kept when the study is stopped.
        data: Folder of the samples; None: the usual places.
        console: Gets tables and verdicts.
        only_show: Whether to compute nothing.
    """

    file: Path
    data: Path | None
    console: Console
    only_show: bool = False

    def report_name(self, options: Plan) -> str:
        """Return one for each task."""
        return f"large-batch-{options.task.name}"

    def measure(self, options: Plan) -> Measured:
        """Complete the plan; the outcomes are `Results`.

        Raises:
            ConfigurationError: The samples are not there, or `file` is something else. Nothing was computed.
        """
        store = Store(self.file)
        if not self.only_show:
            with progress_bar(f"large-batch, {options.task.name}") as progress:
                complete(options, store, self.data, progress)
        results = Results(options, store)
        trials = [asdict(trial) | asdict(outcome) for trial, outcome in results.used()]
        num_missing = len(options.next_trials(store))
        missing = f"not complete: at least {num_missing} trials are missing; the same command goes on"
        return Measured(results, {"trials": trials}, [missing] if num_missing else [])

    def find(self, outcomes: Results, options: Plan) -> Findings:
        """Set accuracies by row and batch into tables, and decide the papers' claims."""
        columns, rows = outcomes.batch_table(RULE)
        baseline = outcomes.baseline()
        task, rate = options.task, outcomes.rate(options.references()[0], RULE)
        reference = f"{baseline} at {rate:g}" if baseline else "not there yet"
        return Findings(
            "What does a larger global batch, or a shorter message, cost in accuracy?",
            tuple(columns),
            [tuple(row) for row in rows],
            (
                f"{task.title}: {task.num_train:,} samples, {task.epochs} epochs at any batch",
                f"each rank has {task.rank_batch} samples a step; small batch, one rank: {reference}",
                _PROTOCOL.format(num_seeds=options.num_seeds),
                "ranks are in one process, one after another, with the library's reductions between them",
            ),
            {
                "tuned": outcomes.batch_table(TUNED),
                "messages": outcomes.message_table(),
                "claims": [_record(verdict) for verdict in judge(outcomes)],
            },
        )

    def config(self, options: Plan) -> dict[str, Any]:
        """Return names instead of whole tasks and rows."""
        return {
            "task": options.task.name,
            "rows": [row.name for row in options.rows],
            "factors": options.factors,
            "tuned_factors": options.tuned_factors,
            "num_seeds": options.num_seeds,
            "grid": options.grid,
            "middle_rates": dict(options.task.middle_rates),
        }

    def draw(self, record: Mapping[str, Any], path: Path) -> bool:
        return draw(record, path)

    def publish(self, outcomes: Results, report: Report, folder: Path, as_json: bool) -> None:
        """Write the report as JSON; print tables and verdicts to the console."""
        path = folder / f"{report.name}.json"
        path.write_text(report.to_json() + "\n")
        tables = (
            (f"{outcomes.plan.task.title}: test accuracy %, by global batch", report.columns, report.rows),
            ("Rates tuned in each case", *report.summaries["tuned"]),
            ("Messages", *report.summaries["messages"]),
        )
        for title, columns, rows in tables:
            if rows:
                self._print(title)  # as a table's title it would wrap with the table
                self.console.print(table("", columns, rows))
        for verdict in judge(outcomes):
            for line in verdict.lines():
                self._print(line)
        for note in report.notes:
            self._print(f"note   {note}")
        self._print(f"trials: {self.file}; report: {path}")

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)


def complete(plan: Plan, store: Store, data: Path | None, progress: Callable[[float], None]) -> int:
    """Compute all trials of a plan that the store does not have; returns how many that were.

    Args:
        plan: Trainings that the study is asked for.
        store: Gets a line for each finished trial.
        data: Folder of the samples; None: the usual places.
        progress: Told the share of the plan that is done, after each trial.
    """
    num_done = 0
    if not plan.next_trials(store):
        return 0
    samples = plan.task.load(data, plan.task.num_train)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small lose by more, and sums would depend on the number
    try:
        while missing := plan.next_trials(store):
            for trial in missing:
                store.add(trial, run_trial(trial, samples))
                num_done += 1
                progress(min(1.0, plan.num_there(store) / plan.num_trials()))
    finally:
        torch.set_num_threads(threads)
    return num_done


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw accuracy over batch, by the rule and tuned, and over bytes; returns whether it was drawn."""
    results = results_of(record)
    panels = [_over_batch(results, mode) for mode in (RULE, TUNED)] + [_over_bytes(results)]
    drawn = [panel for panel in panels if panel is not None]
    task = results.plan.task
    note = (
        f"{task.title}, {task.num_train:,} samples, {task.epochs} epochs at any batch. Means over up to "
        f"{results.plan.num_seeds} seeds, bands: all seeds; hollow: one seed. By the rule: the small batch's "
        "best rate, transferred."
    )
    return bool(drawn) and draw_figure(path, _finding(results), drawn, note, columns=1)


def results_of(record: Mapping[str, Any]) -> Results:
    """Return a plan and its trials, from a report as it is stored."""
    config, trials = record["config"], record["samples"]["trials"]
    outcomes = [
        (Trial(*[one[f.name] for f in fields(Trial)]), Outcome(*[one[f.name] for f in fields(Outcome)]))
        for one in trials
    ]
    task = replace(TASKS[config["task"]], middle_rates=config["middle_rates"])
    if outcomes:
        task = replace(task, epochs=outcomes[0][0].epochs, num_train=outcomes[0][0].num_train)
    plan = Plan(
        task,
        tuple(choose_rows(config["rows"])),
        tuple(config["factors"]),
        tuple(config["tuned_factors"]),
        config["num_seeds"],
        tuple(config["grid"]),
    )
    return Results(plan, Store.holding(outcomes))


def _finding(results: Results) -> str:
    """The largest batch at which some rule keeps the small batch's accuracy, to within a point."""
    baseline = results.baseline()
    if baseline is None:
        return "Accuracy by global batch"
    rows = [row for row in results.plan.rows if row.table == BATCHES and row.name != BASELINE]
    kept: dict[int, list[str]] = {}
    for factor in results.plan.factors:
        for row in rows:
            spread = results.spread(Cell(row, factor))
            if factor > 1 and spread is not None and spread.mean >= baseline.mean - 1:
                kept.setdefault(factor, []).append(row.name)
    small = f"the small batch's {baseline.mean:.1f} %"
    if not kept:
        return f"No rule keeps {small} to within a point at {min(results.plan.factors)} times the batch"
    most = max(kept)
    return f"Up to {most} times the batch, {small} is kept to within a point, with {', '.join(kept[most])}"


def _over_batch(results: Results, mode: str) -> Panel | None:
    """Lines over several batches, bars at a single one."""
    factors = [f for f in (results.plan.factors if mode == RULE else results.plan.tuned_factors) if f > 1]
    lines = []
    rows = [row for row in results.plan.rows if row.table == BATCHES and row.name != BASELINE]
    for row, color in zip(rows, ROW_COLORS, strict=False):
        cells = [(float(factor), results.spread(Cell(row, factor), mode)) for factor in factors]
        spreads = {factor: spread for factor, spread in cells if spread is not None}
        if spreads:
            lines.append(_line(row.name, spreads, color))
    baseline = results.baseline()
    if not lines or baseline is None:
        return None
    size = results.plan.task.rank_batch
    title, ticks = f"rates {mode}", {float(f): f"{f * size:,}" for f in factors}
    if len(factors) == 1:
        bars = [Bar(line.label, line.points[0][1], line.color) for line in lines]
        marks = {f"{BASELINE}: {baseline.mean:.1f}": baseline.mean}
        return Bars(f"{title}, {factors[0]} times the reference batch", "test accuracy, %", bars, marks)
    return Lines(
        title,
        "global batch, samples",
        "test accuracy, %",
        lines,
        ticks,
        log_x=True,
        bottom=_SHOWN_SHARE * baseline.mean,
        levels={BASELINE: baseline.mean},
    )


def _line(name: str, spreads: Mapping[float, Spread], color: str) -> Line:
    """Means in the band of all seeds; hollow where there is one seed only."""
    points = [(factor, spread.mean) for factor, spread in spreads.items()]
    band = [(min(spread.values), max(spread.values)) for spread in spreads.values()]
    single = [(factor, spread.mean) for factor, spread in spreads.items() if len(spread.values) == 1]
    return Line(name, points, color, band=band, single=single)


def _over_bytes(results: Results) -> Panel | None:
    """Diverged runs leave the picture at the bottom, so that the others can be told apart."""
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
    baseline = results.baseline()
    if not lines or baseline is None:
        return None
    if steps:
        lines.append(Line("16, ..., 1 local steps", sorted(steps), LIMIT, ":", "."))
    xs = [x for line in lines for x, _ in line.points]
    ticks = {2.0**n: f"{2**n} kB" for n in range(24) if min(xs) / 2 < 2.0**n < 2 * max(xs)}
    return Lines(
        f"{CODEC_FACTOR} ranks, shorter or rarer messages",
        "sent per rank and step",
        "test accuracy, %",
        lines,
        ticks,
        log_x=True,
        bottom=_SHOWN_SHARE * baseline.mean,
    )


def _record(verdict: Verdict) -> dict[str, Any]:
    return {**asdict(verdict), "summary": verdict.summary}


def main(
    data: DataFolder = None,
    model: Annotated[
        str, typer.Option(help="Task: mlp, cnn (Fashion-MNIST), letter, bytes (Shakespeare) or digits.")
    ] = "mlp",
    rows: Annotated[str, typer.Option(help="Rows of the table, comma-separated.", show_default="all")] = "",
    batches: Annotated[
        str, typer.Option(help="Global batches, as multiples of the reference batch, comma-separated.")
    ] = "8,16,32,64",
    tune: Annotated[
        str | None,
        typer.Option(help="Batches at which learning rates are tuned as well.", show_default="16,32"),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of random seeds per mean.")] = 5,
    quick: Annotated[
        bool, typer.Option("--quick", help="Quick smoke test: digits, four rows, one batch.")
    ] = False,
    store: StoreFile = None,
    report_folder: ReportFolder = REPORT_FOLDER,
    only_show: OnlyShow = False,
    as_json: AsJson = False,
) -> None:
    """Train with growing global batches by every rule, and say which of the papers' claims hold."""
    if quick:
        plan = quick_plan()
    else:
        task, factors = find_task(model), counts_in("--batches", batches)
        if tune is None:
            tuned = tuple(factor for factor in TUNED_FACTORS if factor in factors)
        else:
            tuned = counts_in("--tune", tune)
        plan = Plan(task, tuple(choose_rows(names_in(rows))), factors, tuned, seeds)
    file = store or report_folder / f"large-batch-{plan.task.name}.jsonl"
    console = Console(stderr=as_json, width=max(Console().width, 120))  # narrower, the tables' cells break
    with keeping(file):
        found = run_study(LargeBatchStudy(file, data, console, only_show), plan, report_folder, as_json)
    if as_json:
        print(json.dumps(found.record()))
