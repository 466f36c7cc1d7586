"""`paceline demo`: the product's promise on real images, in under a minute."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class _Dtype(str, Enum):
    float64 = "float64"
    float32 = "float32"


def demo(
    data: Annotated[
        str, typer.Option(help="digits, fashion-mnist, or a folder with MNIST's four files.")
    ] = "digits",
    ranks: Annotated[
        int, typer.Option("--ranks-per-host", "--nproc-per-node", min=1, help="Number of worker processes.")
    ] = 2,
    epochs: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=100_000,
            help="Number of passes over the training set.",
            show_default="16 for digits, 3 for larger images",
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            min=0, max=2**63 - 1, help="Random seed of the initial parameters and the samples' order."
        ),
    ] = 0,
    dtype: Annotated[
        _Dtype, typer.Option(help="float32 shows how training amplifies float32's rounding.")
    ] = _Dtype.float64,
    report: Annotated[Path, typer.Option(help="Folder for the figures and the table.")] = Path(
        "paceline-report"
    ),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the rows to stdout, progress to stderr.")
    ] = False,
) -> None:
    """Train on real images over several processes, and compare with one process on the same batches."""
    from rich.console import Console

    from paceline.demo.comparison import run_demo

    if epochs is None:
        epochs = 16 if data == "digits" else 3
    rows = run_demo(data, ranks, epochs, seed, dtype.value, report, Console(stderr=as_json))
    if as_json:
        print(json.dumps(rows))
