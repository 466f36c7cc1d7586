"""`paceline demo`: the product's promise on real images, in under a minute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def demo(
    data: Annotated[
        str, typer.Option(help="digits, fashion-mnist, or a folder with MNIST's four files.")
    ] = "digits",
    ranks: Annotated[int, typer.Option(help="Worker processes.")] = 2,
    epochs: Annotated[
        int | None,
        typer.Option(
            help="How often to see the training set.", show_default="16 for digits, 3 for larger images"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the initial parameters and the order of the samples.")] = 0,
    dtype: Annotated[
        str, typer.Option(help="float64, or float32 to see how training amplifies float32's rounding.")
    ] = "float64",
    report: Annotated[Path, typer.Option(help="Folder for the figures and rows.")] = Path("paceline-report"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the rows to stdout, progress to stderr.")
    ] = False,
) -> None:
    """Train on real images over several processes, and compare with one process on the same batches."""
    from rich.console import Console

    from paceline.demo.screen import Screen
    from paceline.demo.two_trainings import DemoSettings, run_demo

    if epochs is None:
        epochs = 16 if data == "digits" else 3
    settings = DemoSettings(data, ranks, epochs, seed, dtype, report)
    rows = run_demo(settings, Screen(Console(stderr=as_json)))
    if as_json:
        print(json.dumps(rows))
