"""`paceline report`: a run as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="A run folder that was recorded.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Write a run as one page of HTML: what delays its steps, and what that rests on.

    The page needs no network and no other file. `paceline doctor --record RUN -- COMMAND` records a run.
    """
    from paceline.report.files import write_page

    print(write_page(run, out))
