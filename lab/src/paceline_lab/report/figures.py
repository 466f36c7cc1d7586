"""Figures: panels in rows, under a title that is the finding and over a note on its condition. Never opens a window.

Each is saved twice: as PNG, and as SVG on whatever page it lies, whose colours follow the reader's light or dark mode.

Matplotlib is used through its objects, without pyplot: no global state, no display. It takes most of a second to
import, so only what draws pays for it; where it is missing, `draw_figure` does nothing and returns False.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline_lab.report.look import PART_COLORS, SHAPE_CONTRAST, STYLE, TEXT_CONTRAST, WIDTH_IN, on_dark
from paceline_lab.report.panels import LINE_POINTS, Bars, Panel, three_digits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TITLE_WIDTH, _NOTE_WIDTH = 76, 112  # characters a line
_NOTE_COLOR = "#555555"
_IN_TEXT = ':is([id^="text_"],[id="label"]) '  # groups: a text with an outline is paths


def draw_figure(
    path: Path, title: str, panels: Sequence[Panel], note: str = "", columns: int | None = None
) -> bool:
    """Draw panels in rows and save them; returns whether it was drawn.

    Args:
        path: Path of the PNG; the SVG lies next to it, under the same name.
        title: Title, which states the result.
        panels: Left to right, then down.
        note: Under which condition; stands below.
        columns: None: two, if the panels then fill their rows, else one.
    """
    if not _has_matplotlib():
        return False
    from matplotlib import rc_context  # noqa: PLC0415

    style: Any = STYLE  # whose keys matplotlib spells out as a type
    with rc_context(style):
        figure = _figure(title, panels, note, columns or (2 if len(panels) % 2 == 0 else 1))
        figure.savefig(path.with_suffix(".png"))
        figure.savefig(path.with_suffix(".svg"), transparent=True, metadata={"Date": None, "Title": title})
    svg = path.with_suffix(".svg")
    if svg.exists():
        svg.write_text(with_dark_twin(svg.read_text()))
    return True


def with_dark_twin(svg: str) -> str:
    """Return a picture that a reader in dark mode sees in colours for dark pages.

    Matplotlib writes colours into each element's style; rules of a style sheet for dark mode say what each becomes.
    """
    colors = sorted(set(re.findall(r"#[0-9a-f]{6}\b", svg)))
    rules = "".join(
        f'{what}[style*="{kind}: {color}"]{{{kind}:{on_dark(color, least)}!important}}'
        for color in colors
        for what, kind, least in (
            ("", "fill", SHAPE_CONTRAST),
            ("", "stroke", SHAPE_CONTRAST),
            (_IN_TEXT, "fill", TEXT_CONTRAST),
        )
        if f"{kind}: {color}" in svg
    )
    rules += f'text:not([style*="fill"]){{fill:{on_dark("#000000")}}}'
    fonts = "text{font-family:'DejaVu Sans',Verdana,sans-serif}"
    sheet = f"<style>{fonts}@media (prefers-color-scheme:dark){{{rules}}}</style>"
    return re.sub(r"(<svg [^>]*>)", rf"\1\n {sheet}", svg, count=1, flags=re.DOTALL)


def _figure(title: str, panels: Sequence[Panel], note: str, columns: int) -> Figure:
    from matplotlib.figure import Figure  # noqa: PLC0415

    rows = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    heights = [max(panel.height_in + (0.2 if panel.title else 0) for panel in row) for row in rows]
    title_lines = textwrap.wrap(title, _TITLE_WIDTH)
    note_lines = textwrap.wrap(note, _NOTE_WIDTH)
    extra = (
        0.2 * (len(title_lines) + 1.4 * any(panel.parts for panel in panels)) + 0.15 * len(note_lines) + 0.2
    )
    figure = Figure(figsize=(WIDTH_IN, sum(heights) + extra), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.06, h_pad=0.05)  # type: ignore[union-attr, call-arg]
    parts = dict.fromkeys(part for panel in panels for part in panel.parts)
    figure.suptitle("\n".join([*title_lines, ""] if parts else title_lines), x=0.012, ha="left")
    grid = figure.subplots(len(rows), columns, squeeze=False, gridspec_kw={"height_ratios": heights})
    drawn = [(panel, grid[y][x]) for y, row in enumerate(rows) for x, panel in enumerate(row)]
    for axes in list(grid.flat)[len(panels) :]:
        axes.remove()
    for panel, axes in drawn:
        panel.draw(axes)
        pad = 6 + (LINE_POINTS * panel.num_rows_above if isinstance(panel, Bars) else 0)
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


def show_time(duration_s: float) -> str:
    """Return a time as text with three digits and a unit, such as `72.0 ms`."""
    unit, factor = next(
        ((unit, factor) for unit, factor in (("s", 1.0), ("ms", 1e3)) if duration_s * factor >= 1),
        ("µs", 1e6),
    )
    return f"{three_digits(duration_s * factor)} {unit}"


def show_ratio(ratio: float, what: str) -> str:
    """Return a length over that of `what`: `29 % shorter than torch's`, or `as long as torch's`."""
    percent = 100 * abs(ratio - 1)
    if percent < 1.5:
        return f"as long as {what}"
    return f"{percent:.0f} % {'shorter' if ratio < 1 else 'longer'} than {what}"


def _has_matplotlib() -> bool:
    try:
        import matplotlib.figure  # noqa: F401, PLC0415
    except ImportError:
        return False
    return True
