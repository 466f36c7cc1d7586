"""Writes a run's timeline and its page, from a run folder or while a command runs; says what was written."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.errors import ConfigurationError
from paceline.given import check_output
from paceline.observe.run_reading import Run, read_run
from paceline.report.chrome_trace import Timeline, timeline_of
from paceline.report.page import page_of


def write_timeline(folder: Path, out: Path, most_steps: int) -> str:
    """Write a run folder's timeline; says what was written. ConfigurationError if there is nothing to draw."""
    check_output(out, "--out")
    run = read_run(folder)
    found = timeline_of(run, most_steps)
    if not found.num_steps:
        raise ConfigurationError(
            f"the run in {folder} has no complete step yet, so there is nothing to draw. {_sentence(run)}"
        )
    found.write(out)
    return _written(run, found, out)


def trace_command(
    command: Sequence[str],
    out: Path,
    most_steps: int,
    note: Callable[[str], None],
    folder: Path | None = None,
) -> int:
    """Run a command, write its timeline every few seconds while it runs, and at its end; returns its exit code.

    `out` is a complete file at any time. Records are kept in a new `folder`, if one is given. `note` gets a message
    for each file.
    Raises ConfigurationError, before anything starts, if there is no such command or a file cannot be written.
    """
    from paceline.launch.recorded_command import record_command  # noqa: PLC0415  imports torch

    check_output(out, "--out")

    def look(place: Path) -> None:
        found = timeline_of(read_run(place), most_steps)
        if found.num_steps:
            found.write(out)

    run, code = record_command(launched(command), folder, look)
    found = timeline_of(run, most_steps)
    if found.num_steps:
        found.write(out)
        note(_written(run, found, out))
    else:
        note(f"nothing was written to {out}: no rank completed a step. {_sentence(run)}")
    return code


def write_page(folder: Path, out: Path) -> str:
    """Write a run folder's page; returns what was written, in words. Raises as `write_timeline`."""
    check_output(out, "--out")
    run = read_run(folder)
    out.write_text(page_of(run), encoding="utf-8")
    return f"{out}: {_amount(out.stat().st_size)}, {_ranks(run)}; open it in any browser"


def launched(command: Sequence[str]) -> list[str]:
    """Turn a script, or options of `paceline run`, into a command; others stay as they are."""
    if command and (command[0].endswith(".py") or command[0].startswith("-")):
        return [sys.executable, "-m", "paceline", "run", *command]
    return list(command)


def _written(run: Run, found: Timeline, out: Path) -> str:
    size_bytes = out.stat().st_size
    each = size_bytes / max(1, sum(len(rank.steps[-found.num_steps :]) for rank in run.ranks))
    left_out = f", {found.num_left_out:,} earlier ones left out (--last)" if found.num_left_out else ""
    notes = f" Of the run: {'; '.join(run.notes)}." if run.notes else ""
    return (
        f"{out}: {found.num_steps:,} steps of {_ranks(run)}{left_out}, {_amount(size_bytes)} ({each / 1e3:.1f} kB a "
        f"rank and step). Open it in ui.perfetto.dev, or chrome://tracing.{notes}"
    )


def _sentence(run: Run) -> str:
    return f"{'; '.join(run.notes)}." if run.notes else ""


def _ranks(run: Run) -> str:
    here = len(run.ranks)
    return f"{here} ranks" if here == run.num_ranks else f"{here} of {run.num_ranks} ranks"


def _amount(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.0f} kB"
