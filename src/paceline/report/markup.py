"""Small pieces of the page: rows, legends, tables, and drawings as inline SVG. Every word is escaped here.

Shapes stretch to any width; words are in HTML outside, and do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from paceline.observe.run_records import PHASES

_WIDTH = 1000.0
ORDER = (*PHASES[:-1], "other", PHASES[-1])
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


@dataclass(frozen=True)
class Span:
    """A piece of a strip."""

    start: float  # on the strip's scale
    end: float  # on the same
    colour: str  # the name of a variable of the style sheet
    title: str  # what a pointer that rests on it is told
    inset: bool = False  # whether it is drawn lower, within another


def strip(spans: Sequence[Span], scale: float, kind: str = "strip", label: str = "") -> str:
    """Spans beside each other, from 0 to `scale`."""
    shapes = []
    for span in spans:
        x, width = _WIDTH * span.start / scale, _WIDTH * (span.end - span.start) / scale
        y, height = (4, 2) if span.inset else (0, 10)
        shapes.append(
            f'<rect x="{x:.2f}" y="{y}" width="{max(width, 0.0):.2f}" height="{height}" '
            f'style="fill:var(--{span.colour})"><title>{escape(span.title)}</title></rect>'
        )
    return (
        f'<svg class="{kind}" viewBox="0 0 {_WIDTH:g} 10" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label, quote=True)}">{"".join(shapes)}</svg>'
    )


def curve(values: Sequence[float], top: float, marked: Sequence[int], label: str) -> str:
    """Values from left to right, below `top`, with dashed lines at marked places."""
    last = max(1, len(values) - 1)
    points = " ".join(
        f"{_WIDTH * place / last:.1f},{100 - 100 * min(value / top, 1):.1f}"
        for place, value in enumerate(values)
    )
    lines = "".join(f'<line x1="0" x2="{_WIDTH:g}" y1="{y}" y2="{y}"/>' for y in (25, 50, 75))
    marks = "".join(
        f'<line class="mark" x1="{_WIDTH * place / last:.1f}" x2="{_WIDTH * place / last:.1f}" y1="0" y2="100"/>'
        for place in marked
    )
    return (
        f'<svg class="curve" viewBox="0 0 {_WIDTH:g} 100" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label, quote=True)}">{lines}{marks}<polyline points="{points}"/></svg>'
    )
