"""Which options does every benchmark take, and how does it end?"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.app import command_of
from paceline.errors import PacelineError

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS_FOLDER = REPOSITORY / "benchmarks" / "results"

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
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def _made(folder: Path) -> Path:
    """Make it before anything is measured, not when there is something to lose."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder


ResultsFolder = Annotated[Path, typer.Option(help="Where the JSON and the figure go.", callback=_made)]


def run_cli(main: Callable[..., Any]) -> None:
    """Run a benchmark's command line; what it cannot answer becomes one paragraph and exit status 1.

    The ranks import what they run, so it must not come from a module that is called `__main__`.
    """
    spec = sys.modules["__main__"].__spec__
    assert spec is not None, "python -m starts a benchmark"
    with _one_paragraph():
        made = typer.Typer(add_completion=False)
        made.command()(getattr(importlib.import_module(spec.name), main.__name__))
        command_of(made)()


@contextmanager
def _one_paragraph() -> Iterator[None]:
    try:
        yield
    except PacelineError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
