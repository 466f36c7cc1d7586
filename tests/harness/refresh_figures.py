"""Bring the figures of rows up to date after measuring again: `python tests/harness/refresh_figures.py D5 M2`.

It rounds the stored values of each named row of `lab/results/figures.json`, with as many digits as before. It writes
them to the pages and to that file. Pages may print some of a row's figures, and in any order. Words and verdicts do not
change, so read the difference.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.figures import NUMBER, PROSE_COLUMNS, RESULTS, value_of, written
from harness.terminal import REPOSITORY

PAGES = [
    str(page.relative_to(REPOSITORY))
    for page in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md")))
    if "\n| # |" in page.read_text()
]
_UNREAD = re.compile(r"`[^`]*`|\]\([^)]*\)")  # code and links hold no figures


def main(names: list[str]) -> None:
    """Refresh the rows."""
    path = RESULTS / "figures.json"
    rows = json.loads(path.read_text())
    for name in names:
        old = [figure for figure, _ in rows[name]["figures"]]
        new = [_shown(value_of(source), figure) for figure, source in rows[name]["figures"]]
        if old == new:
            continue
        pages = {page: found for page in PAGES if (found := list(_figures(REPOSITORY / page, name)))}
        if not pages:
            raise SystemExit(f"{name}: no page prints its figures.")
        for page, found in pages.items():
            printed = [figure for _, figure in found]
            _replace(REPOSITORY / page, found, _renewed(name, printed, old, new))
        rows[name]["figures"] = [
            [value, source] for value, (_, source) in zip(new, rows[name]["figures"], strict=True)
        ]
        print(f"{name}: {', '.join(f'{a} -> {b}' for a, b in zip(old, new, strict=True) if a != b)}")
    path.write_text(written(rows))


def _renewed(name: str, printed: list[str], old: list[str], new: list[str]) -> list[str]:
    """Return the new figures of the sources of `printed`, which a page prints instead.

    Raises:
        SystemExit: The page prints a figure without a source, or one of several sources whose new values differ.
    """
    placed = _in_order(printed, old)
    if len(placed) == 1:
        return [new[index] for index in placed[0]]
    candidates = [
        {after for before, after in zip(old, new, strict=True) if before == each} for each in printed
    ]
    for each, values in zip(printed, candidates, strict=True):
        if len(values) != 1:
            raise SystemExit(f"{name}: a page prints {each}, which is {len(values)} different figures now.")
    return [values.pop() for values in candidates]


def _in_order(printed: list[str], old: list[str]) -> list[tuple[int, ...]]:
    """Return up to two ways to find the printed figures among the old ones, in order."""
    found: list[tuple[int, ...]] = [()]
    for each in printed:
        found = [
            (*places, index)
            for places in found
            for index in range(places[-1] + 1 if places else 0, len(old))
            if old[index] == each
        ][:1000]
    return found[:2]


def _shown(value: float, figure: str) -> str:
    comma = "," if "," in figure or abs(value) >= 1000 else ""
    return f"{value:{comma}.{len(figure.partition('.')[2])}f}"


def _figures(page: Path, name: str) -> Iterator[tuple[int, str]]:
    """Yield the row's figures in the page's tables, with their lines."""
    header: list[str] = []
    start = 0
    for line in page.read_text().splitlines(keepends=True):
        cells = re.split(r"(?<!\\)\|", line)[1:-1]
        if not line.startswith("|"):
            header = []
        elif not header:
            header = [cell.strip() for cell in cells]
        elif header[0] == "#" and cells[0].strip() == name:
            at = start + 1
            for title, cell in zip(header, cells, strict=True):
                if title not in PROSE_COLUMNS:
                    read = _UNREAD.sub(lambda code: " " * len(code[0]), cell)
                    yield from ((at + match.start(), match[0]) for match in NUMBER.finditer(read))
                at += len(cell) + 1
        start += len(line)


def _replace(page: Path, found: list[tuple[int, str]], new: list[str]) -> None:
    text = page.read_text()
    for (at, before), after in sorted(zip(found, new, strict=True), reverse=True):
        text = text[:at] + after + text[at + len(before) :]
    page.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
