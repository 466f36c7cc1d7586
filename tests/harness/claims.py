"""The verdicts on the page of claims. `python tests/harness/claims.py` writes the table at the page's end.

A claim's row in `lab/results/figures.json` has its figures, and:

    verdict   `tests`: names of tests that assert it. Or a rule: calculations (see `harness.figures`) for `holds` and
              for `holds in part`, of which the first true one is the verdict, and `words` for both. Without a true
              one it is `refuted`. Or the reason why it is `judged` by people, or `untested`.
    samples   Paths to lists of numbers, one list for each cell. `PATH reading FIELD` leads to lists of records.
              A path `PATH by FIELD, FIELD reading FIELD` leads to records; those that agree in the first fields are a
              cell. Cells with fewer samples than the path's largest are left out, because a search tried other
              settings there. Or words, if there is nothing to count.
"""

from __future__ import annotations

import datetime as dt
import re
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.figures import RESULTS, Row, calculated, found_at, result_of, stored_rows, tables
from harness.terminal import REPOSITORY

PAGE = REPOSITORY / "docs" / "notebook" / "claims.md"
HEADING = "## What the verdicts rest on\n"
FEWEST_FOR_A_SPREAD = 5
# Parts of a result's configuration that say how much was measured, and not what. So do lists, but for those of sides.
HOW_MUCH = {"num_rounds", "num_steps", "num_seeds", "repeats", "folder"}
SIDES = {"side_names", "sides"}


def verdict_of(row: Row) -> str | None:
    """Return the verdict that follows from a claim's rule or tests, or None if it does not follow by computing."""
    if "tests" in row.verdict:
        return "holds"
    if "words" not in row.verdict:
        return None
    for verdict in ("holds", "holds in part"):
        if verdict in row.verdict and calculated(row.verdict[verdict]):
            return verdict
    return "refuted"


def cells(path: str) -> list[list[float]]:
    """Return the samples that a path leads to, grouped by cell."""
    path, _, field = path.partition(" reading ")
    path, _, keys = path.partition(" by ")
    found = found_at(path)
    if keys:
        groups: dict[tuple[Any, ...], list[Any]] = {}
        for record in found:
            groups.setdefault(tuple(record[key] for key in keys.split(", ")), []).append(record)
        found = list(groups.values())
    if field:
        found = [[record[field] for record in records] for records in found]
    most = max(map(len, found))
    return [values for values in found if not keys or len(values) == most]


def samples_of(row: Row) -> list[list[float]]:
    """Return all cells of a claim."""
    return [] if isinstance(row.samples, str) else [cell for path in row.samples for cell in cells(path)]


def spread_of(values: list[float]) -> float:
    """Return how far the quartiles are apart, relative to the median."""
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return (upper - lower) / abs(median)


def provenances(row: Row) -> list[Mapping[str, Any]]:
    """Return where and when the results behind a row's figures were measured."""
    paths = [path for _, source in row.figures for path in paths_in(source)]
    paths += [] if isinstance(row.samples, str) else row.samples
    found = {}
    for path in paths:
        file, case, *_ = path.removeprefix("samples > ").replace(" > samples > ", " > ").split(" > ")
        result = result_of(file)
        by_case = result.get("samples") or {}
        record = result.get("provenance") or by_case.get(case, {}).get("provenance")
        if record:
            found[file, record["date"]] = record
    return list(found.values())


def paths_in(source: str) -> list[str]:
    """Return the paths of a figure's source."""
    return re.findall(r'"([^"]+ > [^"]+)"', source) or [source]


def newer_results(path: str) -> Iterator[str]:
    """Names of stored results that answer the same question under the same conditions, and later.

    A path with a `*` is of whatever its own result holds, so it has no newer one.
    """
    file, *keys = path.split(" > ")
    while keys and keys[-1].isdigit():
        keys.pop()
    mine = result_of(file)
    for name in stored_names():
        other = result_of(name)
        if name == file or "*" in keys or not mine.get("question"):
            continue
        if other.get("question") != mine["question"] or _conditions(other) != _conditions(mine):
            continue
        if other["provenance"]["date"] > mine["provenance"]["date"] and _has(" > ".join((name, *keys))):
            yield name


def stored_names() -> list[str]:
    """Return the names of all stored results."""
    return sorted(path.stem for path in RESULTS.glob("*.json") if path.stem != "figures")


def _has(path: str) -> bool:
    try:
        return bool(found_at(path))
    except (KeyError, IndexError, TypeError):
        return False


def _conditions(result: Mapping[str, Any]) -> Any:
    config = result.get("config")
    if not isinstance(config, dict):
        return result.get("place"), config
    counted_out = {key for key, value in config.items() if key in HOW_MUCH or isinstance(value, list)}
    return result.get("place"), {key: config[key] for key in config if key in SIDES or key not in counted_out}


def table(rows: Mapping[str, Row], names: list[str]) -> str:
    """Return the table at the page's end."""
    lines = [
        "| claim | n | spread, % | measured in November | processor | load at most | the verdict follows from |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in names:
        row = rows[name]
        days = sorted(dt.datetime.fromisoformat(record["date"]).day for record in provenances(row))
        loads = [
            record[key]
            for record in provenances(row)
            for key in ("load_average_before", "load_average_after")
        ]
        lines.append(
            f"| {name} | {counted(row)} | {spread(row)} | {_range(days)} | {processors(row)} "
            f"| {f'{max(loads):.1f}' if loads else ''} | {grounds(row)} |"
        )
    return "\n".join(lines) + "\n"


def counted(row: Row) -> str:
    """Return how many samples a cell of the row has."""
    return row.samples if isinstance(row.samples, str) else _range([len(cell) for cell in samples_of(row)])


def processors(row: Row) -> str:
    """Return the processors that measured it, in a word each: `Intel(R) Xeon(R) Processor` is `Xeon`."""
    models = {record["cpu_model"] for record in provenances(row)}
    return ", ".join(sorted({re.sub(r"\(R\)|AMD|Intel|Processor", "", model).strip() for model in models}))


def spread(row: Row) -> str:
    """Return the largest spread of a cell, or nothing if a cell has too few samples."""
    found = samples_of(row)
    if not found or min(map(len, found)) < FEWEST_FOR_A_SPREAD:
        return ""
    return f"{100 * max(map(spread_of, found)):.0f}"


def grounds(row: Row) -> str:
    """Return the grounds of the verdict, in words."""
    if "tests" in row.verdict:
        return ", ".join(f"`{test.partition('::')[2]}`" for test in row.verdict["tests"])
    for kind, word in (("judged", "judged: "), ("untested", "not tested: "), ("words", "")):
        if kind in row.verdict:
            return word + str(row.verdict[kind])
    raise KeyError(f"{row.what} has no verdict in figures.json")


def _range(numbers: list[int]) -> str:
    if not numbers:
        return ""
    least, most = min(numbers), max(numbers)
    return f"{least}" if least == most else f"{least} to {most}"


def page() -> str:
    """Return the page with its current table."""
    head, _, tail = PAGE.read_text().partition(HEADING)
    judged = [found for found in tables(head) if "verdict" in found.header and found.header[0] == "#"]
    names = [row[0] for found in judged for row in found.rows]
    before_table = tail.partition("\n| claim |")[0]
    return f"{head}{HEADING}{before_table}\n{table(stored_rows(), names)}"


if __name__ == "__main__":
    PAGE.write_text(page())
