"""Reads the figures that pages print, and the measured values in `lab/results` that they are figures of.

A table of figures has the first column `#`: the name of its row in `lab/results/figures.json`. There each row has
`what` was measured, the `commands` that measure it again, and its `figures`: as printed, and where the value is.

    a path         `step_time-tiny-2ranks > ours > step_s in ms`: a file of `lab/results`, then keys below its
                   `summaries` (or below the file itself). In a list, a key is an index, or `name=value` for the
                   records that have it (or not: `name!=value`), or the first cell of a row. A summary stands for its
                   median, a text for the number it begins with, `*` for every key.
    a calculation  `100 * (1 - of("study-skipped-sync > NCCL > ours > 1"))`: Python with `of` and `geomean` of paths,
                   and `best`, of a path to pairs: the first half of the pair whose second is the least.

A value is right if it rounds to the printed figure.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from harness.terminal import REPOSITORY

RESULTS = REPOSITORY / "lab" / "results"
UNITS = {"ms": 1e3, "µs": 1e6, "%": 100.0, "MB": 1e-6, "million": 1e-6}
PROSE_COLUMNS = frozenset(
    {"#", "measured", "setting", "unit", "better", "claim", "published", "how", "verdict", "command"}
)
NUMBER = re.compile(r"(?<![\w.\u00d7])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\w)")


@dataclass(frozen=True)
class Table:
    """A markdown table: its header's cells, and the cells of its rows."""

    header: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Row:
    """A row of `figures.json`: figures as printed, each with the path to its value.

    A paper's claim has a verdict and samples as well, which `harness.claims` reads.
    """

    what: str
    commands: list[str]
    figures: list[tuple[str, str]]
    verdict: Mapping[str, Any]
    samples: list[str] | str

    @property
    def printed(self) -> set[str]:
        """The figures of this row."""
        return {figure for figure, _ in self.figures}


def stored_rows() -> dict[str, Row]:
    """Return every row of `figures.json`, by its name."""
    stored = json.loads((RESULTS / "figures.json").read_text())
    return {
        name: Row(
            row["what"],
            row["commands"],
            [(figure, source) for figure, source in row["figures"]],
            row.get("verdict", {}),
            row.get("samples", []),
        )
        for name, row in stored.items()
    }


def written(rows: Mapping[str, Any]) -> str:
    """Return the text of `figures.json`, with a line for each figure."""
    text = json.dumps(rows, indent=1, ensure_ascii=False)
    return re.sub(r'^   \[\n    (".*"),\n    (".*")\n   \]', r"   [\1, \2]", text, flags=re.MULTILINE) + "\n"


def tables(text: str) -> list[Table]:
    """Return every table of a page. An escaped bar inside a cell is not a border."""
    found = []
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        lines = [_cells(line) for line in block.splitlines()]
        found.append(Table(lines[0], lines[2:]))
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def figures_of(table: Table) -> dict[str, set[str]]:
    """Return the figures of a table by the names of its rows: numbers outside prose columns and `code`."""
    columns = [index for index, name in enumerate(table.header) if name not in PROSE_COLUMNS]
    printed: dict[str, set[str]] = {}
    for row in table.rows:
        text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", " ; ".join(row[index] for index in columns))
        printed.setdefault(row[0], set()).update(NUMBER.findall(text))
    return printed


def numbers_in(text: str) -> set[str]:
    """Return the figures of a sentence: numbers outside of `code`."""
    return set(NUMBER.findall(re.sub(r"`[^`]*`", "", text)))


def rounds_to(value: float, figure: str) -> bool:
    """Return whether a value, rounded to as many digits as the figure shows, is that figure."""
    digits = len(figure.partition(".")[2])
    return abs(value - float(figure.replace(",", ""))) <= 0.5 * 10.0**-digits * (1 + 1e-9)


def value_of(source: str) -> float:
    """Return the measured value of a path or a calculation."""
    return float(calculated(source)) if re.search(r'\b(of|geomean|best)\("', source) else _one(source)


def calculated(words: str) -> Any:
    """Return the result of a calculation with measured values."""
    known = {"of": _one, "geomean": _geomean, "best": _best}
    known |= {function.__name__: function for function in (all, any, abs, max, min)}
    return eval(words, {"__builtins__": {}, **known})


def _one(path: str) -> float:
    (value,) = _values(path)
    return value


def _best(path: str) -> float:
    return float(min(found_at(path)[0], key=lambda pair: pair[1])[0])


def _geomean(*paths: str) -> float:
    values = [value for path in paths for value in _values(path)]
    return math.exp(sum(map(math.log, values)) / len(values))


def _values(path: str) -> list[float]:
    path, scale = _without_unit(path)
    return [_number(value) * scale for value in found_at(path)]


def found_at(path: str) -> list[Any]:
    """Return the values stored at a path."""
    file, *keys = path.split(" > ")
    result = result_of(file)
    found = [result.get("summaries", result) if keys[0] not in result else result]
    for key in keys:
        found = [value for record in found for value in _step(record, key)]
    return found


def _without_unit(path: str) -> tuple[str, float]:
    head, _, unit = path.rpartition(" in ")
    return (head, UNITS[unit]) if head and unit in UNITS else (path, 1.0)


@cache
def result_of(file: str) -> Any:
    """Return a stored result."""
    return json.loads((RESULTS / f"{file}.json").read_text())


def _step(record: Any, key: str) -> list[Any]:
    if isinstance(record, dict):
        return list(record.values()) if key == "*" else [record[key]]
    if key == "*":
        return list(record)
    if re.fullmatch(r"\d+", key):
        return [record[int(key)]]
    if "=" in key:
        wanted = [re.split("(!?=)", part) for part in key.split(", ")]
        return [
            each
            for each in record
            if all((str(each[name]) == value) == (sign == "=") for name, sign, value in wanted)
        ]
    return [row for row in record if row[0] == key]


def _number(value: Any) -> float:
    if isinstance(value, dict):
        value = value["median"]
    if isinstance(value, str):
        (value,) = re.findall(r"^[\d.]+", value.replace(",", ""))
    return float(value)
