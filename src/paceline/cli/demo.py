"""`paceline demo`: what Paceline does, shown in a minute: equal results, a lost rank, a slow rank."""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated

import typer

from paceline.errors import ConfigurationError

app = typer.Typer()


class _Dtype(str, Enum):
    float64 = "float64"
    float32 = "float32"


@app.callback(invoke_without_command=True)
def _compare(
    context: typer.Context,
    ranks: Annotated[
        int, typer.Option("--ranks-per-host", "--nproc-per-node", min=1, help="Number of worker processes.")
    ] = 2,
    epochs: Annotated[
        int, typer.Option(min=1, max=100_000, help="Number of passes over the training set.")
    ] = 16,
    seed: Annotated[
        int,
        typer.Option(
            min=0, max=2**63 - 1, help="Random seed of the initial parameters and the samples' order."
        ),
    ] = 0,
    dtype: Annotated[
        _Dtype, typer.Option(help="float32 shows how training amplifies float32's rounding.")
    ] = _Dtype.float64,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the rows to stdout, progress to stderr.")
    ] = False,
) -> None:
    """Show in a minute what Paceline does, on this machine.

    `paceline demo survive` kills a rank while four train. `paceline demo doctor` makes one of four ranks slow.

    Without either: train on real images over several processes, and compare with one process on the same batches.
    """
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    from rich.console import Console

    from paceline.demo.comparison import run_demo

    rows = run_demo(ranks, epochs, seed, dtype.value, Console(stderr=as_json))
    if as_json:
        print(json.dumps(rows))


def _refuse_options(context: typer.Context) -> None:
    """Raise ConfigurationError if options of the comparison were given to another demo, which would ignore them."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            raise ConfigurationError(
                f"paceline demo {context.invoked_subcommand} takes no options, and {parameter.opts[0]} is one of "
                "paceline demo. Leave it out."
            )


@app.command("survive")
def _survive() -> None:
    """Kill one of four ranks while they train, and compare the result with an undisturbed run, bit by bit."""
    from rich.console import Console

    from paceline.demo.survival import run_survival

    run_survival(Console())


@app.command("doctor")
def _doctor() -> None:
    """Make one of four ranks slow in a job with torch's DDP, ask the doctor, repair it, and score the prediction."""
    from rich.console import Console

    from paceline.demo.slow_rank import run_slow_rank

    run_slow_rank(Console())
