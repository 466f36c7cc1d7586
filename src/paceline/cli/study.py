"""`paceline study`: what large batches and short messages cost in accuracy, on real data."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="What large batches and short messages cost in accuracy, on real data.", no_args_is_help=True
)


@app.callback()
def _group() -> None:
    """Keep `large-batch` a command of its own: typer would merge a single one into the group."""


@app.command("large-batch")
def large_batch(
    data: Annotated[
        Path | None, typer.Option(help="Folder of the data set.", show_default="the usual places")
    ] = None,
    model: Annotated[
        str, typer.Option(help="mlp, cnn (Fashion-MNIST), letter, bytes (Shakespeare) or digits.")
    ] = "mlp",
    rows: Annotated[str, typer.Option(help="Comma-separated.", show_default="all")] = "",
    batches: Annotated[str, typer.Option(help="In reference batches, comma-separated.")] = "8,16,32,64",
    tune: Annotated[
        str | None, typer.Option(help="Batches at which rates are also chosen anew.", show_default="16,32")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs behind each mean.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Digits, four rows, one batch: seconds.")] = False,
    store: Annotated[
        Path | None,
        typer.Option(help="File of finished runs.", show_default="large-batch-MODEL.jsonl in --report"),
    ] = None,
    report: Annotated[Path, typer.Option(help="Folder for the JSON and the figure.")] = Path(
        "paceline-report"
    ),
    only_show: Annotated[
        bool, typer.Option("--only-show", help="Compute nothing; show what is there.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON to stdout, progress to stderr.")
    ] = False,
) -> None:
    """Train with growing global batches by every rule, and say which of the papers' claims hold."""
    from rich.console import Console

    from paceline.lab.report import ReportFolder
    from paceline.lab.study.plan import TUNED_FACTORS, Plan, quick_plan
    from paceline.lab.study.rows import choose_rows
    from paceline.lab.study.run import study
    from paceline.lab.study.tasks import find_task

    if quick:
        plan = quick_plan()
    else:
        names = [name.strip() for name in rows.split(",") if name.strip()]
        task, factors = find_task(model), _factors("--batches", batches)
        if tune is None:
            tuned = tuple(factor for factor in TUNED_FACTORS if factor in factors)
        else:
            tuned = _factors("--tune", tune)
        plan = Plan(task, tuple(choose_rows(names)), factors, tuned, seeds)
    folder = ReportFolder.prepare(report)
    file = store or folder.path / f"large-batch-{plan.task.name}.jsonl"
    console = Console(stderr=as_json, width=max(Console().width, 120))  # narrower, the tables' cells break
    try:
        record = study(plan, file, data, folder.path, console, only_show=only_show)
    except KeyboardInterrupt:
        print(
            f"paceline: stopped. Finished runs are in {file}; the same command goes on from there.",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(record))


def _factors(option: str, words: str) -> tuple[int, ...]:
    from paceline.errors import ConfigurationError

    try:
        return tuple(sorted({int(word) for word in words.split(",") if word.strip()}))
    except ValueError:
        raise ConfigurationError(f"{option} {words} is not a list of numbers such as 8,16,32.") from None
