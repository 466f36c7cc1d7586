"""`paceline run --watch`: a line a rank in the terminal, of its last steps, and under them what delays them.

Ranks record into a folder of the launch, as for `paceline doctor`; the end of each file is read once a second. What the
ranks print goes through this process meanwhile, because it would otherwise be written into the table.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from typing_extensions import Self

from paceline.diagnosis import diagnose
from paceline.observe.run_folder import begin_run
from paceline.observe.run_reading import Run, run_of
from paceline.quantities import ms

_TAIL_BYTES = 64 * 1024
_SHOWN_STEPS = 20
_MOST_RANKS = 24
_BAR = 32  # characters
_COLOURS = {
    "loading": "yellow",
    "forward": "blue",
    "backward": "cyan",
    "optimizer": "green",
    "checkpoint": "magenta",
    "garbage": "red",
    "recording": "white",
    "other": "bright_black",
    "waiting": "grey37",
}


class LiveView:
    """The table of what ranks record in `folder`, redrawn once a second; a context manager around the launch."""

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        self._folder = folder
        self._header = begin_run(folder, command)
        self._live = Live(
            get_renderable=self._draw,
            console=Console(stderr=True),
            refresh_per_second=1,
            redirect_stdout=sys.stdout.isatty(),
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def _draw(self) -> Group | Text:
        run = self.read()
        if not run.ranks:
            return Text("no rank has completed a step yet", style="bright_black")
        finding = diagnose(run).finding
        return Group(table_of_ranks(run), Text(finding.sentence if finding is not None else ""))

    def read(self) -> Run:
        """Read the last steps of the ranks that have completed some."""
        paths = [path for path in self._folder.glob("rank*.jsonl") if ".before." not in path.name]
        run = run_of(self._header, {path.name: _ends_of(path) for path in paths})
        return replace(run, ranks=tuple(rank for rank in run.ranks if rank.steps))


def _ends_of(path: Path) -> bytes:
    """Return a file's first line, which says whose it is, and its last ones; nothing while it is made or replaced."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        first = file.readline()
        at = max(len(first), file.seek(0, 2) - _TAIL_BYTES)
        file.seek(at)
        last = file.read()
        return first + (last if at == len(first) else last.partition(b"\n")[2])
    return b""


def table_of_ranks(run: Run) -> Table:
    """Return a table with the medians of the last steps, in which the slowest part is marked."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
    for name in ("rank", "host", "step", "takes", "waits", "own work"):
        table.add_column(name, justify="left" if name in ("host", "own work") else "right", no_wrap=True)
    for rank in run.ranks[:_MOST_RANKS]:
        steps = rank.steps[-_SHOWN_STEPS:]
        phases = [step.phases_s() for step in steps]
        medians = {
            name: median(each[name] for each in phases)
            for name in _COLOURS
            if name in phases[0] or name == "other"
        }
        takes_s = median(step.step_s for step in steps)
        waits_s = median(step.waited_s for step in steps)
        table.add_row(
            str(rank.header.rank),
            rank.header.host,
            f"{steps[-1].step:,}",
            ms(takes_s),
            f"{waits_s / takes_s:.0%}" if takes_s else "",
            _bar(medians),
        )
    if len(run.ranks) > _MOST_RANKS:
        table.add_row("", f"and {len(run.ranks) - _MOST_RANKS} more")
    return table


def _bar(medians: dict[str, float]) -> Text:
    total_s = sum(medians.values()) or 1.0
    bar, done = Text(), 0.0
    for name, seconds in medians.items():
        width = round(_BAR * (done + seconds) / total_s) - round(_BAR * done / total_s)
        bar.append(("·" if name == "waiting" else "█") * width, style=_COLOURS[name])
        done += seconds
    longest = max((name for name in medians if name != "waiting"), key=lambda name: medians[name])
    bar.append(f"  {longest} {ms(medians[longest])}")
    return bar
