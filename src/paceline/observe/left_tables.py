"""`paceline run --timings`: each rank leaves its tables of timings in a folder as it ends, and the launcher prints one.

A rank that does not end by itself (killed, `os._exit`) leaves none.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline.files_given import parse_json
from paceline.quantities import ms

if TYPE_CHECKING:
    from paceline.observe.timings import StepTimings

VARIABLE = "PACELINE_TIMINGS"
"""In the ranks' environment: the folder that they leave tables in."""
_APART = 0.1  # of a step: so much longer on one rank than on another is worth a line
# what a rank does, whatever the others do
_OWN = ("forward", "backward", "optimizer", "loading and the rest")

_all: list[StepTimings] = []  # of this process's models


def leave_at_exit(timings: StepTimings) -> None:
    """Leave the table of these timings when this process ends, if the launcher has asked for it."""
    if os.environ.get(VARIABLE):
        if not _all:
            atexit.register(_leave)
        _all.append(timings)


def _leave() -> None:
    tables = [
        {
            "table": str(timings),
            "num_steps": timings.recent()[-1].step,
            "parts_s": {
                name: median(step.parts_s[name] for step in timings) for name in timings.recent()[0].parts_s
            },
        }
        for timings in _all
        if len(timings)
    ]
    folder = Path(os.environ[VARIABLE])
    if tables and folder.is_dir():
        Path(folder, f"timings.{os.environ.get('RANK', '0')}.{os.getpid()}").write_text(json.dumps(tables))


def found_in(folder: Path) -> Iterator[str]:
    """Yield what to print of the tables that ranks have left there: the first rank's, and the ranks that differ."""
    by_rank: dict[int, list[Mapping[str, Any]]] = {}
    for path in sorted(folder.glob("timings.*")):
        by_rank.setdefault(int(path.name.split(".")[1]), []).extend(parse_json(path.read_bytes()))
    if not by_rank:
        yield "no timings: no rank has trained a step with paceline.DistributedDataParallel and ended by itself"
        return
    first = min(by_rank)
    for number, left in enumerate(by_rank[first]):
        which = f", model {number + 1} of {len(by_rank[first])}" if len(by_rank[first]) > 1 else ""
        yield f"rank {first}{which}: {left['table']}"
        same = {rank: tables[number]["parts_s"] for rank, tables in by_rank.items() if number < len(tables)}
        yield from _differences(same)


def _differences(parts_s: Mapping[int, Mapping[str, float]]) -> Sequence[str]:
    step_s = max(sum(parts.values()) for parts in parts_s.values())
    lines = []
    for name in _OWN:
        low, high = (choose(parts_s, key=lambda rank: parts_s[rank][name]) for choose in (min, max))
        low_s, high_s = parts_s[low][name], parts_s[high][name]
        if high_s - low_s > _APART * step_s:
            lines.append(f"ranks differ: {name} takes {ms(low_s)} on rank {low}, {ms(high_s)} on rank {high}")
    return lines
