"""Which options do experiments have in common?"""

from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import ConfigurationError
from paceline_lab.report.publication import ReportFolder as _Prepared

REPORT_FOLDER = Path("paceline-report")

Sides = Annotated[
    str, typer.Option(help="Comma-separated names from paceline_lab.bench.sides; the first is the baseline.")
]
Ranks = Annotated[int, typer.Option(min=1, help="How many processes.")]
Rounds = Annotated[int, typer.Option(min=2, help="How many rounds; every side runs twice in each.")]
Hosts = Annotated[int, typer.Option(help="Of an emulated cluster; 0: two ranks on loopback.")]
Rate = Annotated[str, typer.Option(help="Of each host's link; none: as fast as the machine is.")]
ComputeS = Annotated[float, typer.Option(help="Forward and backward together.")]
Turns = Annotated[int, typer.Option(min=2, help="Rounds; every side has two turns in each.")]
Steps = Annotated[int, typer.Option(min=2, help="Consecutive steps of a turn.")]
Quick = Annotated[bool, typer.Option("--quick", help="Tiny sizes: does it run, not what does it measure.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout, progress to stderr.")]
DataFolder = Annotated[
    Path | None, typer.Option(help="Folder of the data set.", show_default="the usual places")
]
OnlyShow = Annotated[bool, typer.Option("--only-show", help="Compute nothing; show what is there.")]
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
