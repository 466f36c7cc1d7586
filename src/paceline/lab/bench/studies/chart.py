"""Panels of lines or of stacked bars: the published figure beside ours. Nothing is drawn without matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAPER, TORCH, OURS, OTHER = "tab:gray", "tab:orange", "tab:blue", "tab:green"
_WIDTH, _HEIGHT = 5.4, 4.6


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
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    ticks: Sequence[float] = ()  # of x; also makes it logarithmic
    tick_labels: Sequence[str] = ()  # instead of the ticks' values
    linear_x: bool = False
    from_zero: bool = True
    bottom: float | None = None  # of the picture; lines may leave it


def draw_panels(path: Path, title: str, panels: Sequence[Panel]) -> bool:
    """Draw panels side by side; returns whether it was drawn."""
    figure = _figure(len(panels))
    if figure is None:
        return False
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
    return _save(figure, path, title)


@dataclass(frozen=True)
class Bars:
    """One panel of stacked bars."""

    title: str
    y_label: str
    parts: Sequence[str]
    bars: Mapping[str, Sequence[float]] = field(default_factory=dict)


def draw_bars(path: Path, title: str, panels: Sequence[Bars]) -> bool:
    """Draw panels of stacked bars side by side, one legend; returns whether it was drawn."""
    figure = _figure(len(panels), width=3.3)
    if figure is None:
        return False
    colors = ("tab:blue", "tab:cyan", "tab:red", "tab:green", "tab:gray")
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, panel in zip(all_axes, panels, strict=True):
        names = list(panel.bars)
        ends = [0.0] * len(names)
        for i, part in enumerate(panel.parts):
            heights = [panel.bars[name][i] for name in names]
            axes.bar(range(len(names)), heights, bottom=ends, color=colors[i], label=part, width=0.7)
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
    return _save(figure, path, title)


def _figure(num_panels: int, width: float = _WIDTH) -> Any:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  # only what draws pays for it
    except ImportError:
        return None
    return Figure(figsize=(max(7.0, width * num_panels), _HEIGHT), layout="constrained")


def _save(figure: Any, path: Path, title: str) -> bool:
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=110)
    return True
