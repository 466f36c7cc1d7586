"""`paceline doctor`: which rank is slow, why, and what it costs to leave it so."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from paceline.errors import ConfigurationError

if TYPE_CHECKING:
    from paceline.diagnosis import Diagnosis

COMMAND = "command behind --"
"""In a context's `meta`: the words behind `--`; None: there was none."""


class TakesACommand(TyperCommand):
    """A command whose words behind `--` are another command, with options of its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Divide the words at the first `--`."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[COMMAND] = args[at + 1 :] if at < len(args) else None
        found: list[str] = super().parse_args(ctx, args[:at])
        return found


RunFolder = Annotated[Path | None, typer.Argument(help="A run folder that was recorded.", show_default=False)]
Record = Annotated[
    Path | None,
    typer.Option(help="Keep what is recorded of the command in this new folder.", show_default=False),
]
Earlier = Annotated[
    Path | None,
    typer.Option(
        help="An earlier run folder: say how good its predictions were for this one.", show_default=False
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(
        min=12,
        help="Record so many steps of the command, then let it train on unrecorded.",
        show_default="all",
    ),
]
Paused = Annotated[
    bool,
    typer.Option(
        "--paused", help="Begin unrecorded: removing the file `detached` of the --record folder begins it."
    ),
]
Machines = Annotated[
    str | None,
    typer.Option(
        "--nnodes",
        help="Check so many machines and every link between them. Give the same on each, with --rdzv-endpoint.",
        show_default="this one",
    ),
]
Endpoint = Annotated[
    str | None,
    typer.Option(
        "--rdzv-endpoint", help="HOST:PORT of the first machine, as for paceline run.", show_default=False
    ),
]
Metrics = Annotated[
    Path | None,
    typer.Option(
        help="Write what is found of the command as OpenMetrics into this file, every few seconds.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout, the command's output to stderr.")]


def doctor(
    context: typer.Context,
    run: RunFolder = None,
    record: Record = None,
    was: Earlier = None,
    steps: Steps = None,
    paused: Paused = False,
    machines: Machines = None,
    endpoint: Endpoint = None,
    metrics: Metrics = None,
    as_json: AsJson = False,
) -> int:
    """Say which rank or link delays a training, why, and how long a step takes without it.

    `paceline doctor -- torchrun train.py` runs a command and records it, with torch's DDP or Paceline's.

    `paceline doctor RUN` reads what was recorded. Without either, this machine and its network are checked.
    """
    command = context.meta[COMMAND]
    is_run = command is not None
    for words, holds in {
        "Pass a command behind --, as in `paceline doctor -- torchrun train.py`, or a run folder; not both.": (
            is_run and (run is not None or not command)
        ),
        "--was compares two run folders: record this run first, with --record.": is_run and was is not None,
        "--was compares two run folders: pass the later one, too.": was is not None and run is None,
        "--was says its comparison in words: leave out --json.": was is not None and as_json,
        "--paused needs --record: recording begins when FOLDER/detached is removed.": (
            is_run and paused and record is None
        ),
        "--record, --steps, --paused and --metrics are for a command. Pass one behind --, as in `paceline doctor "
        "-- torchrun train.py`.": not is_run
        and (any(x is not None for x in (record, steps, metrics)) or paused),
        f"{run} is a file. To watch a script, write `paceline doctor -- torchrun {run}`.": run
        and run.is_file(),
    }.items():
        if holds:
            raise ConfigurationError(words)
    if command is not None:
        return _watch(command, record, steps, metrics, is_paused=paused, as_json=as_json)
    if run is None:
        return _check(machines, endpoint, as_json=as_json)
    from paceline.diagnosis.findings import diagnose_folder
    from paceline.diagnosis.remedies import scored

    now = diagnose_folder(run)
    _show(now, as_json=as_json)
    if was is not None:
        print("\n".join(scored(diagnose_folder(was), now)))
    return 0


def _check(machines: str | None, endpoint: str | None, *, as_json: bool) -> int:
    """Check before a run what would go wrong on this machine, or between several."""
    from paceline.preflight import check

    checkup = check.checkup(machines, endpoint, as_json=as_json)
    if checkup is None:  # another process prints it
        return 0
    if as_json:
        print(checkup.as_json)
        return 0
    from rich.console import Console

    console = Console()
    for part in check.page(checkup):
        console.print(part)
    return 0


def _watch(
    command: list[str],
    record: Path | None,
    steps: int | None,
    metrics: Path | None,
    *,
    is_paused: bool,
    as_json: bool,
) -> int:
    from paceline.launch.recorded_command import run_recorded

    diagnosis, code = run_recorded(
        command, record, steps, _note, is_paused=is_paused, is_quiet=as_json, metrics=metrics
    )
    if as_json:
        _show(diagnosis, as_json=True)
    else:
        _note(_page(diagnosis))
        if record is not None:
            _note(f"the run is kept in {record}; `paceline doctor {record}` reads it again")
    return code


def _show(diagnosis: Diagnosis, *, as_json: bool) -> None:
    from dataclasses import asdict

    print(json.dumps(asdict(diagnosis), indent=2) if as_json else _page(diagnosis))


def _page(diagnosis: Diagnosis) -> str:
    """Return the page of a diagnosis: its sentence, the ranks' health, and what the run lacks."""
    lines = [diagnosis.words]
    if diagnosis.finding is not None:
        seen = f"Seen in {diagnosis.finding.sureness:.0%} of {diagnosis.num_steps} steps"
        lines.append(f"{seen} on {diagnosis.num_ranks} ranks.")
    if diagnosis.not_measured:
        lines.append(f"Not measured: {'; '.join(diagnosis.not_measured)}.")
    lines += [f"Of the run: {note}." for note in diagnosis.notes]
    return "\n".join(lines)


def _note(text: str) -> None:
    print(f"paceline doctor: {text}", file=sys.stderr, flush=True)
