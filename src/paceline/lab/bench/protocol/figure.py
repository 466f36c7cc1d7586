"""How is a result drawn? Only when matplotlib is installed; a missing figure is not an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.lab.bench.protocol.summary import Summary

_LINE_STYLES = (":", "--", "-", "-.")


def save_bars(
    path: Path,
    title: str,
    unit: str,
    bars: Mapping[str, Summary],
    references: Mapping[str, float] | None = None,
) -> bool:
    """Draw a horizontal bar per entry, whiskers at the quartiles, a line a reference; say if it was drawn."""
    axes = _axes(height=1.8 + 0.4 * len(bars))
    if axes is None:
        return False
    names = list(bars)[::-1]
    medians = [bars[name].median for name in names]
    below = [max(bars[name].median - bars[name].lower_quartile, 0.0) for name in names]
    above = [max(bars[name].upper_quartile - bars[name].median, 0.0) for name in names]
    axes.barh(
        names,
        medians,
        xerr=[below, above],
        color=["tab:blue" if "ours" in name else "tab:gray" for name in names],
    )
    for (name, x), style in zip((references or {}).items(), _LINE_STYLES, strict=False):
        axes.axvline(x, color="tab:red", linestyle=style, label=name)
    if references:
        axes.figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    axes.set_xlabel(unit)
    return _save(axes, path, title)


def save_lines(
    path: Path,
    title: str,
    labels: tuple[str, str],
    lines: Mapping[str, Sequence[tuple[float, Summary]]],
    log_x: bool = False,
    references: Mapping[str, float] | None = None,
) -> bool:
    """Draw one line per entry through (x, summary) points, a level line a reference; say if it was drawn."""
    axes = _axes(height=4.0)
    if axes is None:
        return False
    for name, points in lines.items():
        xs = [x for x, _ in points]
        axes.plot(xs, [summary.median for _, summary in points], marker="o", label=name)
        axes.fill_between(
            xs, [s.lower_quartile for _, s in points], [s.upper_quartile for _, s in points], alpha=0.2
        )
    for (name, y), style in zip((references or {}).items(), _LINE_STYLES, strict=False):
        axes.axhline(y, color="tab:red", linestyle=style, label=name)
    if log_x:
        axes.set_xscale("log", base=2)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.legend()
    return _save(axes, path, title)


def _axes(height: float) -> Any:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  # only what draws pays for it
    except ImportError:
        return None
    return Figure(figsize=(8.0, height), layout="constrained").subplots()


def _save(axes: Any, path: Path, title: str) -> bool:
    axes.set_title(title, fontsize=10)
    axes.figure.savefig(path, dpi=120)
    return True
