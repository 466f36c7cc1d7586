"""Figures: panels of lines, bars, stacked bars or dots, drawn in one look. Never opens a window.

A panel is data; `draw_figure` draws any number of them. A line is named where it ends, a limit where it stands, a bar
at its side with its value at its end, so that no reader has to match colours with a list. The title is the finding, a
note below says under which condition.

Matplotlib is used through its objects, without pyplot: no global state, no display. It takes most of a second to
import, so only what draws pays for it; where it is missing, `draw_figure` does nothing and returns False.
"""

from __future__ import annotations

import math
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.lab.report.look import LIMIT, OURS, PAPER, PART_COLORS, STYLE, WIDTH_IN, look_of
from paceline.lab.report.summary import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TITLE_WIDTH, _NOTE_WIDTH = 76, 112  # characters a line
_LABEL_POINTS = 8.5
_LINE_POINTS = 1.3 * _LABEL_POINTS  # from one label to the next
_CHARACTER_IN, _AXES_IN = 0.068, 5.0  # of a label; of axes, about: to tell whether labels meet
_NOTE_COLOR = "#555555"
_MARK_STYLES = (":", "--", "-", "-.")


class Panel(ABC):
    """One pair of axes."""

    title: str

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
    """Points and how they look; a style with dashes is somebody else's figure, or a limit.

    Attributes:
        label: Stands at the line's end.
        points: (x, y).
        color: One of `look`'s.
        band: The lower and upper quartile at each point, if they are known.
    """

    label: str
    points: Sequence[tuple[float, float]]
    color: str
    style: str = "-"
    marker: str = "o"
    band: Sequence[tuple[float, float]] = ()

    @classmethod
    def of(cls, label: str, points: Sequence[tuple[float, Summary]], color: str) -> Line:
        """Return a line through medians, in the band of their quartiles."""
        band = [(summary.lower_quartile, summary.upper_quartile) for _, summary in points]
        return cls(label, [(x, summary.median) for x, summary in points], color, band=band)

    @classmethod
    def published(cls, label: str, points: Sequence[tuple[float, float]], color: str = PAPER) -> Line:
        """Return somebody else's figures."""
        return cls(label, points, color, "--", "x")


def linear_line(most: float) -> Line:
    """Return the line on which doubling x doubles y, from 1 to `most`."""
    return Line("linear", [(1, 1), (most, most)], "#bbbbbb", "-", "")


@dataclass(frozen=True)
class Lines(Panel):
    """Lines over x.

    Attributes:
        ticks: Of x, and what stands at them; empty: matplotlib's.
        log_x: Whether doubling x is one distance everywhere.
        y_ticks: As `ticks`, and then y is logarithmic.
        bottom: Of the picture; None: where the data ends. Lines may leave it.
        top: Of the picture.
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
            axes.plot(xs, ys, line.style, color=line.color, marker=line.marker)
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
        ends = [(line.points[-1], _at_end(line, bottom), line.color) for line in self.lines]
        ends += [((last_x, y), name, LIMIT) for name, y in self.levels.items()]
        pixels = axes.figure.dpi / 72
        edge, floor = axes.transData.transform((right, bottom))
        found = []
        for (x, y), text, color in ends:
            inside = min(max(y, bottom), top)
            at_x, at_y = axes.transData.transform((x, inside))
            found.append(_End(at_x, at_y, x, inside, text, color))
        halo = [withStroke(linewidth=2.5, foreground="white")]
        last_pixel = axes.transData.transform((last_x, top))[0]
        for column in _columns(found, 40 * pixels):
            most = max(end.at_x for end in column)
            start = (edge if last_pixel - most < 1 else most) + 7 * pixels
            gap = _LINE_POINTS * pixels
            placed = spread([end.at_y for end in column], gap, floor + 0.4 * gap)
            for end, to_y in zip(column, placed, strict=True):
                moved = abs(to_y - end.at_y) > 0.5 * gap or start - end.at_x > 40 * pixels
                axes.annotate(
                    end.text,
                    (end.x, end.y),
                    xytext=((start - end.at_x) / pixels, (to_y - end.at_y) / pixels),
                    textcoords="offset points",
                    va="center",
                    fontsize=_LABEL_POINTS,
                    color=end.color,
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


class _End(NamedTuple):
    """Where a line ends, in pixels and in its panel's units, and what to write there."""

    at_x: float
    at_y: float
    x: float
    y: float
    text: str
    color: str


def _at_end(line: Line, bottom: float) -> str:
    """A line that leaves the picture says how far it goes."""
    y = line.points[-1][1]
    if y >= bottom:
        return line.label
    return f"{line.label} (at {y:.3g})" if len(line.points) == 1 else f"{line.label} (down to {y:.3g})"


def _columns(ends: Sequence[_End], width: float) -> list[list[_End]]:
    """Put ends that are nearer to each other than `width` into one column of labels."""
    columns: list[list[_End]] = []
    for end in sorted(ends):
        if columns and end.at_x - columns[-1][0].at_x < width:
            columns[-1].append(end)
        else:
            columns.append([end])
    return columns


def _rows(places: Mapping[str, float], most: float) -> dict[str, int]:
    """On which row above a panel each name stands, so that those on a row do not meet; the leftmost is lowest."""
    ends: list[float] = []
    found = {}
    for name, place in sorted(places.items(), key=lambda item: item[1]):
        half = 0.5 * len(name) * _CHARACTER_IN / _AXES_IN * most
        row = next((row for row, end in enumerate(ends) if end < place - half), len(ends))
        ends[row : row + 1] = [place + half]
        found[name] = row
    return found


def _write_above(axes: Axes, name: str, x: float, row: int, color: str) -> None:
    axes.annotate(
        name,
        (x, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3 + row * _LINE_POINTS),
        textcoords="offset points",
        ha="center",
        fontsize=_LABEL_POINTS,
        color=color,
        arrowprops={"arrowstyle": "-", "color": color, "lw": 0.4} if row else None,
    )


@dataclass(frozen=True)
class Bar:
    """One horizontal bar.

    Attributes:
        label: Stands at its left.
        value: A number, or many in one: whiskers show the quartiles.
        color: One of `look`'s.
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
        return _rows(self.marks, self._right)

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
                bar.text or _three_digits(bar.length),
                (bar.end, y),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=_LABEL_POINTS,
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
        colors: Of bars of one part, by the bar's label.
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
                fontsize=_LABEL_POINTS,
            )
        axes.set_yticks(range(len(self.bars)), list(self.bars))
        axes.set_ylim(len(self.bars) - 0.5, -0.5)
        axes.set_xlim(0, 1.12 * most)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(self.x_label)

    @property
    def parts(self) -> list[str]:
        """Those that have a colour of their own, in order."""
        found = dict.fromkeys(part for parts in self.bars.values() for part, _ in parts)
        return [part for part in found if part in PART_COLORS]


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
            axes.plot(*zip(*there, strict=True), "o", color=color, markersize=6.5)
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
        rows = _rows({name: math.log(x) - left for name, (x, _) in named.items()}, right - left)
        for name, row in rows.items():
            _write_above(axes, name, *named[name][:1], row, named[name][1])


def draw_figure(
    path: Path, title: str, panels: Sequence[Panel], note: str = "", columns: int | None = None
) -> bool:
    """Draw panels in rows and save them; returns whether it was drawn.

    Args:
        path: Gets the picture, in the format that its ending says.
        title: What was found.
        panels: Left to right, then down.
        note: Under which condition; stands below.
        columns: None: two, if the panels then fill their rows, else one.
    """
    if not _has_matplotlib():
        return False
    from matplotlib import rc_context  # noqa: PLC0415

    style: Any = STYLE  # whose keys matplotlib spells out as a type
    with rc_context(style):
        _figure(title, panels, note, columns or (2 if len(panels) % 2 == 0 else 1)).savefig(path)
    return True


def _figure(title: str, panels: Sequence[Panel], note: str, columns: int) -> Figure:
    from matplotlib.figure import Figure  # noqa: PLC0415

    rows = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    heights = [max(panel.height_in + (0.2 if panel.title else 0) for panel in row) for row in rows]
    title_lines = textwrap.wrap(title, _TITLE_WIDTH)
    note_lines = textwrap.wrap(note, _NOTE_WIDTH)
    extra = (
        0.2 * (len(title_lines) + 1.4 * any(isinstance(panel, Stacks) for panel in panels))
        + 0.15 * len(note_lines)
        + 0.2
    )
    figure = Figure(figsize=(WIDTH_IN, sum(heights) + extra), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.06, h_pad=0.05)  # type: ignore[union-attr, call-arg]
    parts = dict.fromkeys(part for panel in panels if isinstance(panel, Stacks) for part in panel.parts)
    figure.suptitle("\n".join([*title_lines, ""] if parts else title_lines), x=0.012, ha="left")
    grid = figure.subplots(len(rows), columns, squeeze=False, gridspec_kw={"height_ratios": heights})
    drawn = [(panel, grid[y][x]) for y, row in enumerate(rows) for x, panel in enumerate(row)]
    for axes in list(grid.flat)[len(panels) :]:
        axes.remove()
    for panel, axes in drawn:
        panel.draw(axes)
        pad = 6 + (_LINE_POINTS * panel.num_rows_above if isinstance(panel, Bars) else 0)
        axes.set_title(panel.title, pad=pad)
    if parts:
        _name_parts(figure, list(parts), below_in=0.06 + 0.185 * len(title_lines))
    if note:
        figure.supxlabel("\n".join(note_lines), x=0.012, ha="left", fontsize=8, color=_NOTE_COLOR)
    for _ in range(2):  # labels take room, which moves what they stand beside
        figure.draw_without_rendering()
        for panel, axes in drawn:
            for text in [text for text in axes.texts if text.get_gid() == "label"]:
                text.remove()
            before = set(axes.texts)
            panel.label(axes)
            for text in set(axes.texts) - before:
                text.set_gid("label")
    return figure


def _name_parts(figure: Figure, parts: Sequence[str], below_in: float) -> None:
    """One legend for the parts of all stacked bars: they have no end of their own to be named at."""
    from matplotlib.patches import Patch  # noqa: PLC0415

    figure.legend(
        handles=[Patch(color=PART_COLORS[part], label=part) for part in parts],
        loc="upper left",
        bbox_to_anchor=(0.0, 1 - below_in / figure.get_figheight()),
        ncols=len(parts),
    ).set_in_layout(False)


def spread(wanted: Sequence[float], gap: float, lowest: float = -math.inf) -> list[float]:
    """Return places as near as possible to the wanted ones, at least `gap` apart and in the same order.

    None is below `lowest`, if that is possible by moving up.
    """
    blocks: list[list[int]] = []

    def bottom(block: list[int]) -> float:
        return max(lowest, sum(wanted[i] for i in block) / len(block) - (len(block) - 1) / 2 * gap)

    for i in sorted(range(len(wanted)), key=wanted.__getitem__):
        blocks.append([i])
        while len(blocks) > 1 and bottom(blocks[-1]) < bottom(blocks[-2]) + len(blocks[-2]) * gap:
            last = blocks.pop()
            blocks[-1] += last
    placed = [0.0] * len(wanted)
    for block in blocks:
        for k, i in enumerate(block):
            placed[i] = bottom(block) + k * gap
    return placed


def bars_of(sides: Mapping[str, Any], scale: float = 1.0) -> list[Bar]:
    """Return a bar for each side's summary, named and coloured as sides are, multiplied by `scale`."""
    return [
        Bar(look_of(side).name, Summary(**value).times(scale), look_of(side).color)
        for side, value in sides.items()
    ]


def show_time(duration_s: float) -> str:
    """`72.0 ms`: three digits and a unit."""
    unit, factor = next(
        ((unit, factor) for unit, factor in (("s", 1.0), ("ms", 1e3)) if duration_s * factor >= 1),
        ("µs", 1e6),
    )
    return f"{_three_digits(duration_s * factor)} {unit}"


def show_ratio(ratio: float, what: str) -> str:
    """`29 % shorter than torch's`, or `as long as torch's`: a length over that of `what`."""
    percent = 100 * abs(ratio - 1)
    if percent < 1.5:
        return f"as long as {what}"
    return f"{percent:.0f} % {'shorter' if ratio < 1 else 'longer'} than {what}"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _has_matplotlib() -> bool:
    try:
        import matplotlib.figure  # noqa: F401, PLC0415
    except ImportError:
        return False
    return True
