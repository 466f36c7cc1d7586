"""Small pieces of the page: rows with a drawing, legends, tables. Every word is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

ORDER = (
    "loading",
    "forward",
    "backward",
    "optimizer",
    "checkpoint",
    "garbage",
    "recording",
    "other",
    "waiting",
)
WORDS = {
    "loading": "loading data",
    "garbage": "garbage collection",
    "recording": "recording itself",
    "other": "other Python",
    "waiting": "waiting for others",
}


def words_of(phase: str) -> str:
    """Return what a phase is called on the page."""
    return WORDS.get(phase, phase)


def row_of(name: str, drawing: str, value: str, mark: str = "") -> str:
    """Return a drawing between its name and a value; `mark` is a class of the name's."""
    label = f'<span class="name{mark}">{escape(name)}</span>'
    return f'{label}<div>{drawing}</div><span class="value">{escape(value)}</span>'


def rows_of(rows: Iterable[str]) -> str:
    """Return rows under each other, their columns aligned."""
    return f'<div class="rows">{"".join(rows)}</div>'


def legend(names: Iterable[str]) -> str:
    """Return what the colours of these phases mean."""
    words = {"sent": "a bucket is on the way"}
    items = "".join(f'<li style="--c:var(--{name})">{words.get(name, words_of(name))}</li>' for name in names)
    return f'<ul class="legend">{items}</ul>'


def table_of_cells(head: Sequence[str], rows: Iterable[Sequence[str]], *, words: bool = False) -> str:
    """A table that scrolls by itself where it is wider than a phone."""
    kind = ' class="words"' if words else ""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr><td{kind}>{escape(row[0])}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
