"""The study of bounded loss: what gradients that do not arrive cost in quality, on real data.

Source:
    Wang et al. 2020 (DLCP): 0.6 to 3.5 % cost no further epochs, 10 % do not harm the quality that is reached at last.
    Front layers bear more than back layers (1.1 against 0.4 %), small gradients more than large ones (1.6, 0.1 %).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from paceline_lab.experiments.accuracy.loss_bound_runs import (
    BACK,
    FRONT,
    LARGEST,
    PATTERNS,
    QUICK,
    RANDOM,
    SMALLEST,
    TAIL,
    Case,
    LossOptions,
    LossOutcome,
    LossTrial,
    train,
    trials,
)
from paceline_lab.experiments.accuracy.store import TrialStore
from paceline_lab.experiments.accuracy.tasks import TASKS
from paceline_lab.experiments.options import (
    REPORT_FOLDER,
    AsJson,
    DataFolder,
    OnlyShow,
    ReportFolder,
    StoreFile,
    names_in,
    numbers_in,
)
from paceline_lab.experiments.runner import Findings, Measured, Study, keeping, run_study
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import CURVE_COLORS
from paceline_lab.report.panels import Line, Lines
from paceline_lab.report.terminal import progress_bar
from paceline_lossy.bounded_loss import COMPENSATIONS

Outcomes = Mapping[LossTrial, LossOutcome]
_PUBLISHED = {
    "no further epochs": [0.006, 0.035],
    "front": 0.011,
    "back": 0.004,
    "smallest": 0.016,
    "largest": 0.001,
}


@dataclass(frozen=True)
class Measure:
    """A measure of a model's quality.

    Attributes:
        title: Title with its unit.
        of: Function that returns the measure of a run.
        sign: 1 if more is worse, -1 if less is.
        margin: By how much a mean may be worse and still count as harmless.
        digits: Number of decimals.
    """

    title: str
    of: Callable[[LossOutcome], float]
    sign: int
    margin: float
    digits: int

    def show(self, values: Sequence[float]) -> str:
        """Mean and standard deviation."""
        if not values:
            return ""
        spread = f" ± {statistics.stdev(values):.{self.digits}f}" if len(values) > 1 else ""
        return f"{statistics.fmean(values):.{self.digits}f}{spread}"


def _bits(outcome: LossOutcome) -> float:
    return math.inf if outcome.test_loss is None else outcome.test_loss / math.log(2)


PERCENT = Measure("test accuracy, %", lambda outcome: outcome.test_percent, -1, 0.5, 1)
BITS = Measure("test loss, bits per byte", _bits, 1, 0.02, 3)


def measure_of(model: str) -> Measure:
    """Bits for the model of text, the share of right answers for those that classify."""
    return BITS if model == "bytes" else PERCENT


@dataclass(frozen=True)
class Cell:
    """The results of a case's runs.

    Attributes:
        values: Values by seed.
        worse_by: Mean over the seeds of the difference to the same seed without loss; more is worse.
        error: Standard error of that mean; None with one seed.
    """

    values: Mapping[int, float]
    worse_by: float
    error: float | None

    @property
    def is_seen(self) -> bool:
        """Return whether the difference is more than twice its standard error."""
        return self.error is not None and self.worse_by > 2 * self.error


class LossStudy(Study[LossOptions]):
    """Quality by bound, pattern and compensation.

    Args:
        file: File of finished runs, which are kept when the study is stopped.
        data: Folder of the samples; None: the usual places.
        only_show: Whether to compute nothing.
    """

    def __init__(self, file: Path, data: Path | None = None, only_show: bool = False) -> None:
        self._file, self._data, self._only_show = file, data, only_show

    def report_name(self, options: LossOptions) -> str:
        return f"loss-bound-{options.model}"

    def measure(self, options: LossOptions) -> Measured:
        """Compute the runs that the file does not have.

        Raises:
            ConfigurationError: The samples are not there, or the file is something else. Nothing was computed.
        """
        store = TrialStore(self._file, LossTrial, LossOutcome)
        todo = trials(options)
        missing = [trial for trial in todo if store.get(trial) is None]
        if missing and not self._only_show:
            samples = TASKS[options.model].load(self._data, options.num_train)
            with progress_bar(f"loss-bound, {options.model}") as progress, _one_thread():
                for number, trial in enumerate(missing):
                    progress((len(todo) - len(missing) + number) / len(todo))
                    store.add(trial, train(trial, samples))
        wanted = set(todo)
        found = {trial: outcome for trial, outcome in store.items() if trial in wanted}
        left = len(todo) - len(found)
        note = f"not complete: {left} of {len(todo)} runs are missing; the same command goes on"
        return Measured(
            found,
            {"trials": [asdict(trial) | asdict(outcome) for trial, outcome in found.items()]},
            [note] if left else [],
        )

    def find(self, outcomes: Outcomes, options: LossOptions) -> Findings:
        measure = measure_of(options.model)
        cells = cells_of(outcomes, measure)
        exact = cells[Case(0.0)]
        bounds = sorted(bound for bound in options.bounds if bound > 0)
        rows = [
            ("none", "", _seeds([exact]), measure.show(list(exact.values.values())), *("" for _ in bounds))
        ]
        harmless, seen = {}, {}
        for pattern in options.patterns:
            for compensation in options.compensations:
                row = [cells.get(Case(bound, pattern, compensation)) for bound in bounds]
                if not any(row):
                    continue
                shown = [measure.show(list(cell.values.values())) if cell else "" for cell in row]
                rows.append((pattern, compensation, _seeds([cell for cell in row if cell]), "", *shown))
                name = f"{pattern}, {compensation}"
                harmless[name] = _harmless(bounds, row, measure.margin)
                seen[name] = _seen_from(bounds, row)
        task = TASKS[options.model]
        steps = options.epochs * options.num_train // (task.rank_batch * options.num_ranks)
        return Findings(
            "What do gradients that are lost cost in quality?",
            ("lost", "compensation", "seeds", "0 %", *(f"{100 * bound:g} %" for bound in bounds)),
            rows,
            (
                (
                    f"{task.title}: {options.num_train:,} samples, {options.epochs} epochs, {steps} steps of "
                    f"{options.num_ranks} ranks with {task.rank_batch} samples each; {measure.title}, mean ± standard "
                    "deviation over the seeds"
                ),
                (
                    "of all that ranks send each other exactly the bound is lost, in every step, before shards are "
                    "summed (a rank's own part never is); momentum, a rate that falls linearly"
                ),
                (
                    f"harmless is a bound up to which each mean is at most {measure.margin:g} worse than without loss; "
                    "seen, one from which on the mean difference to the same seed without loss is more than twice its "
                    "standard error"
                ),
            ),
            {
                "measure": measure.title,
                "without_loss": statistics.fmean(exact.values.values()),
                "harmless_up_to": harmless,
                "seen_from": seen,
                "published": _PUBLISHED,
                "cells": [
                    asdict(case) | {"seeds": len(cell.values), "worse_by": cell.worse_by, "error": cell.error}
                    for case, cell in cells.items()
                ],
            },
        )

    def draw(self, record: Mapping[str, Any], path: Path) -> bool:
        return draw(record, path)


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw how much worse the model gets with the bound: by compensation, and by which gradients are lost."""
    model = record["config"]["model"]
    measure = measure_of(model)
    found = _from_record(record["samples"]["trials"])
    cells = cells_of(found, measure)
    exact = statistics.fmean(cells[Case(0.0)].values.values())
    places = (RANDOM, TAIL, FRONT, BACK, SMALLEST, LARGEST)
    asked = [
        _panel("random datagrams are lost", [(c, RANDOM, c) for c in COMPENSATIONS], cells, measure),
        _panel(
            "which are lost, with survivors",
            [(place, place, COMPENSATIONS[0]) for place in places],
            cells,
            measure,
        ),
    ]
    panels = [panel for panel in asked if panel.lines]
    harmless = record["summaries"]["harmless_up_to"].get("random, survivors", 0.0)
    quality, _, unit = measure.title.partition(", ")
    task = TASKS[model].title
    title = (
        f"{task[0].upper()}{task[1:]}: losing up to {100 * harmless:g} % at random is harmless "
        f"({quality} without loss: {exact:.{measure.digits}f} {unit})"
    )
    size = record["notes"][0].partition("; ")[0]
    seeds = record["config"]["num_seeds"]
    note = f"{size}. Means of paired differences over up to {seeds} seeds; bands: standard error."
    return draw_figure(path, title, panels, note, columns=1)


def cells_of(outcomes: Outcomes, measure: Measure) -> dict[Case, Cell]:
    """Runs by case, each compared with the run of its seed without loss; a seed that has none is left out."""
    values: dict[Case, dict[int, float]] = {}
    for trial, outcome in outcomes.items():
        values.setdefault(trial.case, {})[trial.seed] = measure.of(outcome)
    exact = values.get(Case(0.0), {})
    cells = {}
    for case, by_seed in values.items():
        there = {seed: value for seed, value in by_seed.items() if seed in exact}
        worse = [measure.sign * (value - exact[seed]) for seed, value in there.items()]
        if worse:
            error = statistics.stdev(worse) / math.sqrt(len(worse)) if len(worse) > 1 else None
            cells[case] = Cell(there, statistics.fmean(worse), error)
    return cells


def _harmless(bounds: Sequence[float], row: Sequence[Cell | None], margin: float) -> float:
    """The largest bound up to which nothing is lost of the quality, of those that were run."""
    highest = 0.0
    for bound, cell in zip(bounds, row, strict=True):
        if cell is None:
            continue
        if cell.worse_by > margin:
            break
        highest = bound
    return highest


def _seen_from(bounds: Sequence[float], row: Sequence[Cell | None]) -> float | None:
    """The smallest bound from which on a difference is seen."""
    lowest = None
    for bound, cell in reversed(list(zip(bounds, row, strict=True))):
        if cell is None:
            continue
        if not cell.is_seen:
            break
        lowest = bound
    return lowest


def _seeds(cells: Sequence[Cell]) -> str:
    numbers = sorted({len(cell.values) for cell in cells})
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _panel(
    title: str, lines: Sequence[tuple[str, str, str]], cells: Mapping[Case, Cell], measure: Measure
) -> Lines:
    drawn = []
    for (label, pattern, compensation), color in zip(lines, CURVE_COLORS, strict=False):
        found = sorted(
            (100 * case.bound, cell.worse_by, cell.error or 0.0)
            for case, cell in cells.items()
            if case.bound > 0 and (case.pattern, case.compensation) == (pattern, compensation)
        )
        if found:
            points = [(x, y) for x, y, _ in found]
            drawn.append(Line(label, points, color, band=[(y - error, y + error) for _, y, error in found]))
    ticks = {x: f"{x:g} %" for line in drawn for x, _ in line.points}
    unit = measure.title.partition(", ")[2].replace("%", "points")
    levels = {"no loss": 0.0, "harmless": measure.margin}
    return Lines(title, "lost", f"worse by, {unit}", drawn, ticks, log_x=True, bottom=None, levels=levels)


def _from_record(rows: Sequence[Mapping[str, Any]]) -> dict[LossTrial, LossOutcome]:
    found = {}
    for row in rows:
        outcome = {name: row[name] for name in LossOutcome.__dataclass_fields__}
        found[LossTrial(**{name: row[name] for name in LossTrial.__dataclass_fields__})] = LossOutcome(
            **outcome
        )
    return found


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread: more make models this small slower, and change the order of sums."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def main(
    data: DataFolder = None,
    model: Annotated[
        str, typer.Option(help="Task: mlp, cnn (Fashion-MNIST), letter, bytes (Shakespeare) or digits.")
    ] = "mlp",
    bounds: Annotated[
        str,
        typer.Option(
            help="Lost part of the gradients in percent, comma-separated, with or without the sign. Include 0."
        ),
    ] = ("0,0.5,1,3,10,20,30"),
    patterns: Annotated[
        str,
        typer.Option(
            help="Which gradients are lost: random, tail, burst, front, back, smallest, largest.",
            show_default="all",
        ),
    ] = "",
    compensations: Annotated[
        str, typer.Option(help="What replaces lost gradients: survivors, none, feedback.", show_default="all")
    ] = "",
    seeds: Annotated[int, typer.Option(min=1, help="Number of random seeds per mean.")] = 3,
    samples: Annotated[
        int, typer.Option(help="Number of training samples.", show_default="some thousands")
    ] = 0,
    epochs: Annotated[int, typer.Option(min=1, help="Number of epochs.")] = 2,
    quick: Annotated[bool, typer.Option("--quick", help="Quick smoke test: digits, one bound.")] = False,
    store: StoreFile = None,
    report_folder: ReportFolder = REPORT_FOLDER,
    only_show: OnlyShow = False,
    as_json: AsJson = False,
) -> None:
    """Train while a bounded part of the gradients is lost, by every pattern and compensation."""
    given = LossOptions(
        model=model,
        bounds=tuple(percent / 100 for percent in numbers_in("--bounds", bounds.replace("%", ""))),
        patterns=names_in(patterns) or PATTERNS,
        compensations=names_in(compensations) or LossOptions.compensations,
        num_seeds=seeds,
        num_train=samples,
        epochs=epochs,
    )
    options = QUICK if quick else given
    file = store or report_folder / f"loss-bound-{options.model}.jsonl"
    with keeping(file):
        run_study(LossStudy(file, data, only_show), options, report_folder, as_json)
