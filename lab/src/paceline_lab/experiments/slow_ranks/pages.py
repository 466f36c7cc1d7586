"""Writes the tables of both studies, of slow ranks and of hangs, into the guide and the notebook, from what is stored.

python -m paceline_lab.experiments.slow_ranks.pages
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from paceline_lab.checkout import in_repository
from paceline_lab.experiments.slow_ranks.grading import Row

_END = "<!-- end -->"
_COLUMNS = ("right rank", "wrong rank", "silent", "right cause")
_COUNTS = ("num_effective", "num_right", "num_wrong", "num_silent", "num_cause")


def pages() -> Mapping[Path, str]:
    """Each page as it follows from the stored results."""
    results = in_repository("lab/results", "the stored results")
    ranks = json.loads((results / "doctor.json").read_text())
    guide, notebook = (in_repository(f"docs/{name}/doctor.md", "the page") for name in ("guide", "notebook"))
    long = _with_block(notebook.read_text(), "doctor", _long(ranks))
    hangs = results / "doctor-hangs.json"
    if hangs.exists():
        long = _with_block(long, "doctor-hangs", _of_hangs(json.loads(hangs.read_text())))
    return {guide: _with_block(guide.read_text(), "doctor", _short(ranks)), notebook: long}


def _with_block(page: str, name: str, lines: Iterable[str]) -> str:
    begin = f"<!-- from lab/results/{name}.json -->"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(_END)
    return "\n".join((f"{before}{begin}", *lines, f"{_END}{after}"))


def _rows(record: Mapping[str, Any]) -> tuple[list[Row], list[Row]]:
    rows = [Row(**found) for found in record["summaries"].values()]
    return [x for x in rows if x.cause != "clean"], [x for x in rows if x.cause == "clean"]


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _sum(rows: list[Row], name: str) -> int:
    return sum(getattr(row, name) for row in rows)


def _short(record: Mapping[str, Any]) -> Iterator[str]:
    asked, clean = _rows(record)
    yield _line("runs in which the step became longer", *_COLUMNS, "alarms in clean runs")
    yield "|---|---|---|---|---|---|"
    yield _line(
        *(_sum(asked, name) for name in _COUNTS), f"{_sum(clean, 'num_wrong')} of {_sum(clean, 'num')}"
    )


def _long(record: Mapping[str, Any]) -> Iterator[str]:
    asked, clean = _rows(record)
    yield _line("cause", "strengths", "runs", "count", *_COLUMNS, "what-if within 5 %")
    yield "|---|---|---|---|---|---|---|---|---|"
    for cause in dict.fromkeys(row.cause for row in asked):
        rows = [row for row in asked if row.cause == cause]
        predicted = _sum(rows, "num_predicted")
        yield _line(
            f"{cause}, {rows[0].unit}",
            ", ".join(f"{row.strength:g}" for row in rows),
            _sum(rows, "num"),
            *(_sum(rows, name) for name in _COUNTS),
            f"{_sum(rows, 'num_close')} of {predicted}" if predicted else "none said",
        )
    errors = [x["error"] for x in record["samples"]["grades"] if x["error"] is not None and x["is_effective"]]
    yield ""
    yield (
        f"Of {_sum(asked, 'num_effective')} runs that count, {_sum(asked, 'num_right')} named the right rank. "
        f"{_sum(asked, 'num_wrong')} named a wrong one, and {_sum(asked, 'num_silent')} were silent. "
        f"The cause was right in {_sum(asked, 'num_cause')}."
    )
    yield f"Of {_sum(clean, 'num')} clean runs, {_sum(clean, 'num_wrong')} raised an alarm."
    if directed := _sum(asked, "num_directed"):
        yield f"The direction of a link was right in {_sum(asked, 'num_direction')} of {directed} runs."
    if errors:
        yield (
            f"Predicted steps are off by {median(map(abs, errors)):.1%} in the median. "
            f"With its sign the median error is {median(errors):+.1%}."
        )
    loads = [x["load"] for x in record["samples"]["grades"] if "load" in x]
    if loads:
        yield f"The load average was {median(loads):.1f} in the median on two cores, and {max(loads):.1f} at most."
    missed = [x["figure"] for x in record["verdicts"] if not x["met"]]
    yield f"Targets missed: {', '.join(missed) or 'none'}."


def _of_hangs(record: Mapping[str, Any]) -> Iterator[str]:
    yield _line(*record["columns"])
    yield f"|{'---|' * len(record['columns'])}"
    for row in record["rows"]:
        yield _line(*row)
    found = record["summaries"]
    yield ""
    yield (
        f"Of {found['hangs']} hangs the median was told of after {found['told_s']['median']:.1f} s, and the last "
        f"after {found['told_s']['most']:.1f} s. "
        f"Of {found['long']} jobs that only take long, {found['false']} were called a hang. "
        f"The load average was {found['load']:.0f} at most, on two cores."
    )
    missed = [x["figure"] for x in record["verdicts"] if not x["met"]]
    yield f"Targets missed: {', '.join(missed) or 'none'}."


if __name__ == "__main__":
    for page, words in pages().items():
        page.write_text(words)
        print(page)
