"""Panels of figures: lines, bars, stacked bars or dots, as data that draws itself onto a pair of axes.

Labels stand next to what they name, so no reader has to match colours with a list. A line has its label at its end,
a bar at its side, with its value.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline_lab.report.label_places import End, columns, rows_above, spread
from paceline_lab.report.look import LIMIT, OURS, PAPER, PART_COLORS, look_of, marker_of, text_color
from paceline_lab.report.summary import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABEL_POINTS = 8.5
STEP_TIME = "step time, ms; lower is better"
LINE_POINTS = 1.3 * LABEL_POINTS  # from one label to the next
_MARK_STYLES = (":", "--", "-", "-.")


class Panel(ABC):
    """One pair of axes."""

    title: str

    @property
    def parts(self) -> list[str]:
        """Return the parts with a colour of their own, which a legend explains, in order."""
        return []

    @property
    def height_in(self) -> float:
        return 2.7

    @abstractmethod
    def draw(self, axes: Axes) -> None:
        """Draw the data."""

    def label(self, axes: Axes) -> None:  # noqa: B027  most need nothing more
        """Write what has to be kept apart from each other, once the axes' size is known."""


@dataclass(frozen=True)
class Line:
    """Points and how they look. A dashed line is a published figure, or a limit.

    Attributes:
        label: Text at the line's end.
        points: Points (x, y).
        color: A colour of `look`.
        style: Matplotlib's line style; empty: points alone.
        band: Lower and upper quartile at each point, if they are known.
        single: Points that a single run stands for; they are hollow.
    """

    label: str
    points: Sequence[tuple[float, float]]
    color: str
    style: str = "-"
    marker: str | None = None  # None: the colour's own
    band: Sequence[tuple[float, float]] = ()
    single: Sequence[tuple[float, float]] = ()

    @classmethod
    def of(cls, label: str, points: Sequence[tuple[float, Summary]], color: str) -> Line:
        """Return a line through medians, in the band of their quartiles."""
        band = [(summary.lower_quartile, summary.upper_quartile) for _, summary in points]
        return cls(label, [(x, summary.median) for x, summary in points], color, band=band)

    @classmethod
    def published(cls, label: str, points: Sequence[tuple[float, float]], color: str = PAPER) -> Line:
        """Return the line of a published figure."""
        return cls(label, points, color, "--", "x")


@dataclass(frozen=True)
class Lines(Panel):
    """Lines over x.

    Attributes:
        ticks: Ticks of x with their labels; empty: matplotlib's.
        log_x: Whether doubling x is one distance everywhere.
        y_ticks: Ticks of y with their labels; y is then logarithmic.
        bottom: Bottom of the picture; None: where the data ends. Lines may leave it.
        top: Top of the picture.
        levels: Horizontal lines, by name.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    ticks: Mapping[float, str] = field(default_factory=dict)
    log_x: bool = False
    y_ticks: Mapping[float, str] = field(default_factory=dict)
    bottom: float | None = 0.0
    top: float | None = None
    levels: Mapping[str, float] = field(default_factory=dict)

    def draw(self, axes: Axes) -> None:
        """Draw lines, bands and levels, and label the axes."""
        for line in self.lines:
            xs, ys = zip(*line.points, strict=True)
            marker = marker_of(line.color) if line.marker is None else line.marker
            axes.plot(xs, ys, linestyle=line.style or "None", color=line.color, marker=marker)
            if line.single:
                once = zip(*line.single, strict=True)
                axes.plot(*once, marker, color=line.color, markerfacecolor="white")
            if line.band:
                lower, upper = zip(*line.band, strict=True)
                axes.fill_between(xs, lower, upper, color=line.color, alpha=0.18, linewidth=0)
        for y in self.levels.values():
            axes.axhline(y, color=LIMIT, linestyle=":", linewidth=1.2)
        if self.log_x:
            axes.set_xscale("log", base=2)
        if self.ticks:
            axes.set_xticks(list(self.ticks), list(self.ticks.values()))
            axes.tick_params(axis="x", which="minor", length=0, labelbottom=False)
        if self.y_ticks:
            axes.set_yscale("log")
            limits = axes.get_ylim()
            axes.set_yticks(list(self.y_ticks), list(self.y_ticks.values()))
            axes.set_ylim(limits)
            axes.tick_params(axis="y", which="minor", length=0, labelleft=False)
        elif self.bottom is not None:
            axes.set_ylim(bottom=self.bottom)
        if self.top is not None:
            axes.set_ylim(top=self.top)
        axes.set(xlabel=self.x_label, ylabel=self.y_label)

    def label(self, axes: Axes) -> None:
        """Name each line at its end and each level at its right, a line of text apart where they would meet."""
        from matplotlib.patheffects import withStroke  # noqa: PLC0415

        bottom, top = axes.get_ylim()
        right = axes.get_xlim()[1]
        last_x = max((x for line in self.lines for x, _ in line.points), default=right)
        ends = [(line.points[-1], _at_end(line, bottom), line.color) for line in self.lines if line.label]
        ends += [((last_x, y), name, LIMIT) for name, y in self.levels.items()]
        pixels = axes.figure.dpi / 72
        edge, floor = axes.transData.transform((right, bottom))
        found = []
        for (x, y), text, color in ends:
            inside = min(max(y, bottom), top)
            at_x, at_y = axes.transData.transform((x, inside))
            found.append(End(at_x, at_y, x, inside, text, color))
        halo = [withStroke(linewidth=2.5, foreground="white")]
        last_pixel = axes.transData.transform((last_x, top))[0]
        for column in columns(found, 40 * pixels):
            most = max(end.at_x for end in column)
            start = (edge if last_pixel - most < 1 else most) + 7 * pixels
            gap = LINE_POINTS * pixels
            placed = spread([end.at_y for end in column], gap, floor + 0.4 * gap)
            for end, to_y in zip(column, placed, strict=True):
                moved = abs(to_y - end.at_y) > 0.5 * gap or start - end.at_x > 40 * pixels
                axes.annotate(
                    end.text,
                    (end.x, end.y),
                    xytext=((start - end.at_x) / pixels, (to_y - end.at_y) / pixels),
                    textcoords="offset points",
                    va="center",
                    fontsize=LABEL_POINTS,
                    color=text_color(end.color),
                    path_effects=halo,
                    annotation_clip=False,
                    arrowprops={
                        "arrowstyle": "-",
                        "color": end.color,
                        "lw": 0.5,
                        "shrinkB": 3,
                        "relpos": (0, 0.5),
                    }
                    if moved
                    else None,
                )


def _at_end(line: Line, bottom: float) -> str:
    """Return the label of a line, with its last value if the line leaves the picture."""
    y = line.points[-1][1]
    if y >= bottom:
        return line.label
    return f"{line.label} (at {y:.3g})" if len(line.points) == 1 else f"{line.label} (down to {y:.3g})"


def _write_above(axes: Axes, name: str, x: float, row: int, color: str) -> None:
    axes.annotate(
        name,
        (x, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3 + row * LINE_POINTS),
        textcoords="offset points",
        ha="center",
        fontsize=LABEL_POINTS,
        color=text_color(color),
        arrowprops={"arrowstyle": "-", "color": color, "lw": 0.4} if row else None,
    )


@dataclass(frozen=True)
class Bar:
    """One horizontal bar.

    Attributes:
        label: Stands at its left.
        value: A number, or many in one: whiskers show the quartiles.
        color: Colour of `look`.
        text: Stands at its right; empty: the value.
    """

    label: str
    value: Summary | float
    color: str = OURS
    text: str = ""

    @property
    def length(self) -> float:
        return self.value.median if isinstance(self.value, Summary) else self.value

    @property
    def end(self) -> float:
        return max(self.length, self.value.upper_quartile if isinstance(self.value, Summary) else 0.0)


@dataclass(frozen=True)
class Bars(Panel):
    """Horizontal bars, the first on top; `marks` are vertical lines, by name."""

    title: str
    x_label: str
    bars: Sequence[Bar]
    marks: Mapping[str, float] = field(default_factory=dict)

    @property
    def height_in(self) -> float:
        return 0.55 + 0.27 * len(self.bars) + 0.16 * self.num_rows_above

    @property
    def num_rows_above(self) -> int:
        return 1 + max(self._mark_rows.values(), default=-1)

    @property
    def _mark_rows(self) -> dict[str, int]:
        return rows_above(self.marks, self._right)

    @property
    def _right(self) -> float:
        return 1.12 * max([bar.end for bar in self.bars] + list(self.marks.values()))

    def draw(self, axes: Axes) -> None:
        """Draw bars, whiskers and values, and a line a mark."""
        for y, bar in enumerate(self.bars):
            axes.barh(y, bar.length, height=0.72, color=bar.color)
            if isinstance(bar.value, Summary):
                axes.plot(
                    [bar.value.lower_quartile, bar.value.upper_quartile], [y, y], color=LIMIT, linewidth=1.0
                )
            axes.annotate(
                bar.text or three_digits(bar.length),
                (bar.end, y),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=LABEL_POINTS,
                bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
            )
        for x, style in zip(self.marks.values(), _MARK_STYLES, strict=False):
            axes.axvline(x, color=LIMIT, linestyle=style, linewidth=1.1)
        axes.set_yticks(range(len(self.bars)), [bar.label for bar in self.bars])
        axes.set_ylim(len(self.bars) - 0.5, -0.5)
        axes.set_xlim(0, self._right)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(self.x_label)

    def label(self, axes: Axes) -> None:
        """Name the marks above the bars."""
        for name, row in self._mark_rows.items():
            _write_above(axes, name, self.marks[name], row, LIMIT)


@dataclass(frozen=True)
class Stacks(Panel):
    """Horizontal bars made of parts laid end to end.

    Attributes:
        bars: What stands at the left, and the bar's (part, value) pairs; a part without a colour of its own takes the
            one in `colors`.
        colors: Colours of bars of one part, by the bar's label.
    """

    title: str
    x_label: str
    bars: Mapping[str, Sequence[tuple[str, float]]]
    colors: Mapping[str, str] = field(default_factory=dict)
    digits: int = 2

    @property
    def height_in(self) -> float:
        return 0.55 + 0.27 * len(self.bars)

    def draw(self, axes: Axes) -> None:
        """Draw the parts, and each bar's length at its end."""
        most = max(sum(value for _, value in parts) for parts in self.bars.values())
        for y, (label, parts) in enumerate(self.bars.items()):
            end = 0.0
            for part, value in parts:
                axes.barh(y, value, left=end, height=0.72, color=self.colors.get(label) or PART_COLORS[part])
                end += value
            axes.annotate(
                f"{end:.{self.digits}f}",
                (end, y),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=LABEL_POINTS,
            )
        axes.set_yticks(range(len(self.bars)), list(self.bars))
        axes.set_ylim(len(self.bars) - 0.5, -0.5)
        axes.set_xlim(0, 1.12 * most)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(self.x_label)

    @property
    def parts(self) -> list[str]:
        found = dict.fromkeys(part for parts in self.bars.values() for part, _ in parts)
        return [part for part in found if part in PART_COLORS]


@dataclass(frozen=True)
class Lanes(Panel):
    """Spans of time in lanes, one above the other.

    Attributes:
        lanes: From the top: what stands at the left, and its spans as (part, begin, end).
        ends: Of lanes, by what stands at their left: where a line is drawn, and what is written there.
        until: The right edge.
    """

    title: str
    x_label: str
    lanes: Mapping[str, Sequence[tuple[str, float, float]]]
    ends: Mapping[str, Sequence[tuple[float, str]]] = field(default_factory=dict)
    until: float | None = None

    @property
    def parts(self) -> list[str]:
        found = {part for spans in self.lanes.values() for part, _, _ in spans}
        return [part for part in PART_COLORS if part in found]

    @property
    def height_in(self) -> float:
        return 0.5 + 0.3 * len(self.lanes)

    def draw(self, axes: Axes) -> None:
        """Draw spans with a thin gap between them, and lines where a step ends."""
        for y, spans in enumerate(self.lanes.values()):
            for part, begin, end in spans:
                axes.barh(
                    y, end - begin, left=begin, height=0.8, color=PART_COLORS[part], edgecolor="white", lw=0.4
                )
        for y, lane in enumerate(self.lanes):
            for x, words in self.ends.get(lane, ()):
                axes.plot([x, x], [y - 0.5, y + 0.5], color=LIMIT, linewidth=1.6)
                if words:
                    axes.annotate(
                        words,
                        (x, y),
                        xytext=(-4, 0),
                        textcoords="offset points",
                        ha="right",
                        va="center",
                        fontsize=LABEL_POINTS,
                    )
        axes.set_yticks(range(len(self.lanes)), list(self.lanes))
        axes.set_ylim(len(self.lanes) - 0.4, -0.6)
        axes.set_xlim(0, self.until)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(self.x_label)


@dataclass(frozen=True)
class Dots(Panel):
    """A row a case, a dot a side: for many cases of several sides. Logarithmic, with a line at `level`.

    Attributes:
        rows: The cases, from the top.
        sides: A label, a colour, and a value for each row (None: not measured).
    """

    title: str
    x_label: str
    rows: Sequence[str]
    sides: Sequence[tuple[str, str, Sequence[float | None]]]
    ticks: Mapping[float, str]
    level: tuple[str, float]

    @property
    def height_in(self) -> float:
        return 0.9 + 0.23 * len(self.rows)

    def draw(self, axes: Axes) -> None:
        """Draw the dots."""
        ys = range(len(self.rows))
        axes.axvline(self.level[1], color=LIMIT, linestyle=":", linewidth=1.2)
        for _, color, values in self.sides:
            there = [(value, y) for value, y in zip(values, ys, strict=True) if value is not None]
            axes.plot(*zip(*there, strict=True), marker_of(color), color=color, markersize=6.5)
        axes.set_xscale("log")
        axes.set_xticks(list(self.ticks), list(self.ticks.values()))
        axes.tick_params(axis="x", which="minor", length=0, labelbottom=False)
        axes.set_yticks(ys, self.rows)
        axes.set_ylim(len(self.rows) - 0.5, -0.7)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(self.x_label)

    def label(self, axes: Axes) -> None:
        """Name each side above its dot in the top row."""
        named = {self.level[0]: (self.level[1], LIMIT)}
        named |= {name: (values[0], color) for name, color, values in self.sides if values[0] is not None}
        left, right = (math.log(bound) for bound in axes.get_xlim())
        rows = rows_above({name: math.log(x) - left for name, (x, _) in named.items()}, right - left)
        for name, row in rows.items():
            _write_above(axes, name, *named[name][:1], row, named[name][1])


def bars_of(sides: Mapping[str, Any], scale: float = 1.0) -> list[Bar]:
    """Return a bar for each side's summary, named and coloured as sides are, multiplied by `scale`."""
    return [
        Bar(look_of(side).name, Summary(**value).times(scale), look_of(side).color)
        for side, value in sides.items()
    ]


def three_digits(value: float) -> str:
    """Return a number with three digits, or all of its whole ones."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
