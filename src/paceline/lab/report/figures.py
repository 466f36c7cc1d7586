"""Figures: lines, bars, and panels of either, with one set of colours, sizes and axes. Never opens a window.

Matplotlib is used through its objects, without pyplot: no global state, no display. It takes most of a second to
import, so only what draws pays for it. The `draw_*` and `save_*` functions do nothing and return False where it is
missing; `lines_figure` and `stacked_bars_figure` need it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from paceline.lab.report.summary import Summary

# Who is who in a comparison with published figures: the paper's, torch's, ours, and anything else.
PAPER, TORCH, OURS, OTHER = "tab:gray", "tab:orange", "tab:blue", "tab:green"
SIDE_COLORS = {"torch": TORCH, "ours": OURS}
# Of curves and of rows that have no such role, in order.
CURVE_COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:red", "tab:brown")
ROW_COLORS = tuple(
    f"tab:{name}"
    for name in ("olive", "orange", "red", "cyan", "blue", "green", "purple", "brown", "pink", "gray")
)
_PART_COLORS = ("tab:blue", "tab:cyan", "tab:red", "tab:green", "tab:gray")  # of a stacked bar
_REFERENCE_COLOR = "tab:red"
_CURVE_STYLES = ("-", "--", ":", "-.")
_REFERENCE_STYLES = (":", "--", "-", "-.")
DOTS_PER_INCH = 120
_PANEL_DOTS_PER_INCH = 110
_WIDTH = 8.0
_PANEL_WIDTH, _BAR_PANEL_WIDTH, _PANEL_HEIGHT = 5.4, 3.3, 4.6


def lines_figure(title: str, x_label: str, y_label: str, lines: Mapping[str, Sequence[float]]) -> Figure:
    """One line a name over 1, 2, 3, ...; later lines are thinner and dashed, so that equal ones both show."""
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    figure, axes = _new()
    for i, (name, values) in enumerate(lines.items()):
        axes.plot(
            range(1, len(values) + 1),
            values,
            _CURVE_STYLES[i % len(_CURVE_STYLES)],
            label=name,
            linewidth=max(1.5, 4 - 2 * i),
        )
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def stacked_bars_figure(
    title: str, x_label: str, parts: Sequence[str], bars: Mapping[str, Sequence[float]]
) -> Figure:
    """One horizontal bar a name, made of `parts` laid end to end."""
    figure, axes = _new(height=2.2 + 0.7 * len(bars))
    names = list(bars)
    ends = [0.0] * len(names)
    for i, part in enumerate(parts):
        widths = [bars[name][i] for name in names]
        axes.barh(names, widths, left=ends, label=part, height=0.55)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(title=title, xlabel=x_label)
    axes.legend(
        ncols=len(parts), loc="upper center", bbox_to_anchor=(0.5, -0.3), frameon=False, fontsize="small"
    )
    return figure


def save_bars(
    path: Path,
    title: str,
    unit: str,
    bars: Mapping[str, Summary],
    references: Mapping[str, float] | None = None,
) -> bool:
    """Draw a horizontal bar per entry, whiskers at the quartiles, a line a reference; say if it was drawn."""
    if not _has_matplotlib():
        return False
    figure, axes = _new(height=1.8 + 0.4 * len(bars))
    names = list(bars)[::-1]
    medians = [bars[name].median for name in names]
    below = [max(bars[name].median - bars[name].lower_quartile, 0.0) for name in names]
    above = [max(bars[name].upper_quartile - bars[name].median, 0.0) for name in names]
    axes.barh(
        names, medians, xerr=[below, above], color=[OURS if "ours" in name else PAPER for name in names]
    )
    for (name, x), style in zip((references or {}).items(), _REFERENCE_STYLES, strict=False):
        axes.axvline(x, color=_REFERENCE_COLOR, linestyle=style, label=name)
    if references:
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    axes.set_xlabel(unit)
    return _save_titled(figure, axes, path, title)


def save_lines(
    path: Path,
    title: str,
    labels: tuple[str, str],
    lines: Mapping[str, Sequence[tuple[float, Summary]]],
    log_x: bool = False,
    references: Mapping[str, float] | None = None,
) -> bool:
    """Draw one line per entry through (x, summary) points, a level line a reference; say if it was drawn."""
    if not _has_matplotlib():
        return False
    figure, axes = _new(height=4.0)
    for name, points in lines.items():
        xs = [x for x, _ in points]
        axes.plot(xs, [summary.median for _, summary in points], marker="o", label=name)
        axes.fill_between(
            xs, [s.lower_quartile for _, s in points], [s.upper_quartile for _, s in points], alpha=0.2
        )
    for (name, y), style in zip((references or {}).items(), _REFERENCE_STYLES, strict=False):
        axes.axhline(y, color=_REFERENCE_COLOR, linestyle=style, label=name)
    if log_x:
        axes.set_xscale("log", base=2)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.legend()
    return _save_titled(figure, axes, path, title)


@dataclass(frozen=True)
class Line:
    """Points and how they look; a style with dashes is somebody else's figure."""

    label: str
    points: Sequence[tuple[float, float]]
    color: str
    style: str = "-"
    marker: str = "o"


@dataclass(frozen=True)
class Panel:
    """One pair of axes with lines."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    ticks: Sequence[float] = ()  # of x; also makes it logarithmic
    tick_labels: Sequence[str] = ()  # instead of the ticks' values
    linear_x: bool = False
    from_zero: bool = True
    bottom: float | None = None  # of the picture; lines may leave it


def linear_line(most: float) -> Line:
    """Return the line on which doubling x doubles y, from 1 to `most`."""
    return Line("linear", [(1, 1), (most, most)], "lightgray", "-", "")


def draw_panels(path: Path, title: str, panels: Sequence[Panel]) -> bool:
    """Draw panels side by side; returns whether it was drawn."""
    if not _has_matplotlib():
        return False
    figure = _new_panels(len(panels), _PANEL_WIDTH)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for line in panel.lines:
            xs, ys = zip(*line.points, strict=True)
            axes.plot(
                xs, ys, line.style, color=line.color, marker=line.marker, markersize=4, label=line.label
            )
        if panel.ticks:
            if not panel.linear_x:
                axes.set_xscale("log", base=2)
            axes.set_xticks(list(panel.ticks), panel.tick_labels or [f"{tick:g}" for tick in panel.ticks])
            axes.minorticks_off()
        if panel.from_zero:
            axes.set_ylim(bottom=0)
        if panel.bottom is not None:
            axes.set_ylim(bottom=panel.bottom)
        axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
        axes.set_title(panel.title, fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(
            fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False
        )
    return _save_panels(figure, path, title)


@dataclass(frozen=True)
class Bars:
    """One panel of stacked bars."""

    title: str
    y_label: str
    parts: Sequence[str]
    bars: Mapping[str, Sequence[float]] = field(default_factory=dict)


def draw_bars(path: Path, title: str, panels: Sequence[Bars]) -> bool:
    """Draw panels of stacked bars side by side, one legend; returns whether it was drawn."""
    if not _has_matplotlib():
        return False
    figure = _new_panels(len(panels), _BAR_PANEL_WIDTH)
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, panel in zip(all_axes, panels, strict=True):
        names = list(panel.bars)
        ends = [0.0] * len(names)
        for i, part in enumerate(panel.parts):
            heights = [panel.bars[name][i] for name in names]
            axes.bar(range(len(names)), heights, bottom=ends, color=_PART_COLORS[i], label=part, width=0.7)
            ends = [end + height for end, height in zip(ends, heights, strict=True)]
        for x, end in enumerate(ends):
            axes.text(x, end + 0.01, f"{end:.2f}", ha="center", fontsize="x-small")
        axes.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize="x-small")
        axes.set_title(panel.title, fontsize=10)
        axes.grid(axis="y", alpha=0.3)
    all_axes[0].set_ylabel(panels[0].y_label)
    all_axes[0].set_ylim(top=1.08 * max(sum(bar) for panel in panels for bar in panel.bars.values()))
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize="small"
    )
    return _save_panels(figure, path, title)


def _has_matplotlib() -> bool:
    try:
        import matplotlib.figure  # noqa: F401, PLC0415
    except ImportError:
        return False
    return True


def _new(height: float = 4.5) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def _new_panels(num_panels: int, width: float) -> Any:
    from matplotlib.figure import Figure  # noqa: PLC0415

    return Figure(figsize=(max(7.0, width * num_panels), _PANEL_HEIGHT), layout="constrained")


def _save_titled(figure: Figure, axes: Axes, path: Path, title: str) -> bool:
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=DOTS_PER_INCH)
    return True


def _save_panels(figure: Figure, path: Path, title: str) -> bool:
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=_PANEL_DOTS_PER_INCH)
    return True
