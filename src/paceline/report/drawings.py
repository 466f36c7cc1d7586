"""Bars, strips and curves as inline SVG. Shapes stretch to any width; words are in HTML outside, and do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH = 1000.0


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
