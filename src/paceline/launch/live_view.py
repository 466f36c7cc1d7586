"""`paceline run --watch`: a line a rank in the terminal, of its last steps, and under them what delays them.

Ranks record into a folder of the launch, as for `paceline doctor`; the end of each file is read once a second. What the
ranks print goes through this process meanwhile, because it would otherwise be written into the table.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from typing_extensions import Self

from paceline.diagnosis import diagnose
from paceline.observe.run_folder import begin_run
from paceline.observe.run_lines import from_line
from paceline.observe.run_reading import RankRun, Run
from paceline.observe.run_records import RankHeader
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
        self._firsts: dict[Path, RankHeader] = {}
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
        return Group(table_of_ranks(run), Text(_sentence(run)))

    def read(self) -> Run:
        """Read the last steps of every rank."""
        found = [rank for path in self._folder.glob("rank*.jsonl") if (rank := self._tail(path)) is not None]
        return Run(self._header, tuple(sorted(found, key=lambda rank: rank.header.rank)))

    def _tail(self, path: Path) -> RankRun | None:
        if ".before." in path.name:
            return None
        try:
            with path.open("rb") as file:
                if path not in self._firsts:
                    first = from_line(file.readline())
                    if not isinstance(first, RankHeader):
                        return None
                    self._firsts[path] = first
                at = max(0, file.seek(0, 2) - _TAIL_BYTES)
                file.seek(at)
                lines = file.read().split(b"\n")[1 if at else 0 : -1]
        except (OSError, ValueError):
            return None  # it is being made, or replaced
        rank = RankRun(self._firsts[path])
        for line in lines:
            try:
                record = from_line(line)
            except ValueError:
                continue
            if isinstance(record, RankHeader):
                rank = RankRun(record)
            elif record is not None:
                rank.add(record)
        return rank if rank.steps else None


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


def _sentence(run: Run) -> str:
    finding = diagnose(run).finding
    return finding.sentence if finding is not None else ""
