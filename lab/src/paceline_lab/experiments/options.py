"""The options that experiments have in common."""

from pathlib import Path
from typing import Annotated

import typer

from paceline import quantities
from paceline.errors import ConfigurationError
from paceline_lab.report.publication import ReportFolder as _Prepared

REPORT_FOLDER = Path("paceline-report")

Sides = Annotated[
    str,
    typer.Option(help="Sides, comma-separated, as of `paceline bench step`. The first one is the baseline."),
]
Ranks = Annotated[
    int, typer.Option("--ranks-per-host", "--nproc-per-node", min=1, help="Number of processes.")
]
Rounds = Annotated[
    int, typer.Option(min=2, help="Number of measuring rounds. Each side runs twice per round.")
]
Hosts = Annotated[
    int,
    typer.Option(
        "--hosts", "--nnodes", help="Number of hosts of an emulated cluster. 0: two ranks on this machine."
    ),
]
Rate = Annotated[str, typer.Option(help="Rate of each host's link, for example 1Gbit. none: not limited.")]


def compute_seconds(given: str | float) -> float:
    """Parse `--compute-s`: 0.5, 0.5s or 500ms."""
    try:
        return quantities.seconds(str(given), "--compute-s", is_bare_possible=True)
    except ConfigurationError as error:
        raise typer.BadParameter(str(error)) from error


COMPUTE_HELP = "Time of forward and backward together: 0.5, 0.5s or 500ms."
ComputeS = Annotated[float, typer.Option(parser=compute_seconds, metavar="TIME", help=COMPUTE_HELP)]
Steps = Annotated[int, typer.Option(min=2, help="Number of consecutive steps per turn.")]
Quick = Annotated[bool, typer.Option("--quick", help="Quick smoke test. Its results are meaningless.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout, progress to stderr.")]
DataFolder = Annotated[
    Path | None, typer.Option(help="Folder of the data set.", show_default="the usual places")
]
OnlyShow = Annotated[bool, typer.Option("--only-show", help="Compute nothing. Show stored results.")]
PartsFolder = Annotated[
    Path | None, typer.Option("--parts", help="Keep each part here, and do not measure again what is there.")
]


def _made(folder: Path) -> Path:
    """Make it before anything is measured, not when there is something to lose."""
    return _Prepared.prepare(folder).path


ReportFolder = Annotated[
    Path, typer.Option("--report", help="Folder for the JSON and the figure.", callback=_made)
]

StoreFile = Annotated[
    Path | None, typer.Option(help="File of finished runs.", show_default="NAME.jsonl in --report")
]


def names_in(words: str) -> tuple[str, ...]:
    """Return the names of a comma-separated list."""
    return tuple(name.strip() for name in words.split(",") if name.strip())


def numbers_in(option: str, words: str) -> tuple[float, ...]:
    """Return the different numbers of a comma-separated list, ascending.

    Raises:
        ConfigurationError: One of them is no number.
    """
    try:
        return tuple(sorted(set(map(float, names_in(words)))))
    except ValueError:
        raise ConfigurationError(f"{option} {words} is not a list of numbers such as 0,0.5,1.") from None


def counts_in(option: str, words: str) -> tuple[int, ...]:
    """Return the different whole numbers of a comma-separated list, ascending.

    Raises:
        ConfigurationError: One of them is no whole number.
    """
    try:
        return tuple(sorted(set(map(int, names_in(words)))))
    except ValueError:
        raise ConfigurationError(f"{option} {words} is not a list of numbers such as 8,16,32.") from None
