"""Keeps the code blocks that the docs include from the source: found by their title, compared, and refreshed.

A block titled `src/paceline/ddp/reducer.py::Reducer._finish` is the source of that function. A title that ends with ",
in part" marks a contiguous part of a function, from the block's first line to its last.

    python tests/harness/included_source.py    rewrites every such block of docs/
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
IN_PART = ", in part"
BLOCK = re.compile(
    r'^```python title="(?P<title>[^"\n]+::[^"\n]+)"\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL
)


def is_included(title: str | None) -> bool:
    """Return whether a block with this title is taken from the source."""
    return title is not None and "::" in title


def current(title: str, text: str) -> str:
    """Return the current text of a block.

    Raises:
        LookupError: There is no such function, or its first or last line is gone.
    """
    where, part = title.removesuffix(IN_PART), title.endswith(IN_PART)
    lines = _source_of(*where.split("::"))
    if part:
        first, last = (line.strip() for line in (text.splitlines()[0], text.splitlines()[-1]))
        stripped = [line.strip() for line in lines]
        if first not in stripped or last not in stripped[stripped.index(first) :]:
            raise LookupError(f"{where} has no part from {first!r} to {last!r} any more")
        start = stripped.index(first)
        lines = lines[start : stripped.index(last, start) + 1]
    return textwrap.dedent("\n".join(lines)) + "\n"


def _source_of(path: str, name: str) -> list[str]:
    """Return the lines of a function or class, with its decorators."""
    text = (REPOSITORY / path).read_text()
    node: Any = ast.parse(text)
    for part in name.split("."):
        inner = [n for n in ast.walk(node) if getattr(n, "name", None) == part and n is not node]
        if not inner:
            raise LookupError(f"{path} has no {name}")
        node = inner[0]
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno])).splitlines()


def refresh(page: Path) -> bool:
    """Rewrite the blocks of a page. Return whether anything changed."""
    before = page.read_text()
    after = BLOCK.sub(
        lambda m: f'```python title="{m["title"]}"\n{current(m["title"], m["text"])}```', before
    )
    page.write_text(after)
    return after != before


if __name__ == "__main__":
    for page in sorted((REPOSITORY / "docs").rglob("*.md")):
        if refresh(page):
            print(page.relative_to(REPOSITORY))
