"""`paceline trace`: every rank's steps on one timeline."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.doctor import COMMAND


def trace(
    context: typer.Context,
    run: Annotated[
        Path | None, typer.Argument(help="A run folder that was recorded.", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("trace.json"),
    last: Annotated[int, typer.Option(min=1, help="Number of steps to show: the last ones.")] = 500,
    record: Annotated[
        Path | None,
        typer.Option(help="Keep what is recorded of the command in this new folder.", show_default=False),
    ] = None,
) -> int:
    """Write all ranks' steps as one timeline, for ui.perfetto.dev or chrome://tracing.

    `paceline trace -- train.py` runs a script, `paceline trace -- --nproc-per-node 4 train.py` four ranks of it, and
    `paceline trace -- torchrun ...` any command. `paceline trace RUN` reads a run folder.
    """
    from paceline.errors import ConfigurationError
    from paceline.report.files import trace_command, write_timeline

    command = context.meta[COMMAND]
    if (command is None) == (run is None) or command == []:
        raise ConfigurationError(
            "Pass a run folder, or a command behind --, as in `paceline trace -- train.py`; not both."
        )
    if command is not None:
        return trace_command(command, out, last, _note, record)
    if record is not None:
        raise ConfigurationError(
            "--record is for a command. Pass one behind --, as in `paceline trace -- train.py`."
        )
    assert run is not None
    _note(write_timeline(run, out, last))
    return 0


def _note(text: str) -> None:
    print(f"paceline trace: {text}", file=sys.stderr, flush=True)
