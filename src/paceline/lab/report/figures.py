"""Numbers to pictures. Uses matplotlib's objects without pyplot: no global state, no display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLES = ("-", "--", ":", "-.")


def lines_figure(title: str, x_label: str, y_label: str, lines: Mapping[str, Sequence[float]]) -> Figure:
    """One line a name over 1, 2, 3, ...; later lines are thinner and dashed, so that equal ones both show."""
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    figure, axes = _new()
    for i, (name, values) in enumerate(lines.items()):
        axes.plot(
            range(1, len(values) + 1),
            values,
            _STYLES[i % len(_STYLES)],
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


def _new(height: float = 4.5) -> tuple[Figure, Axes]:
    # Takes most of a second to import; only a command that draws pays for it.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(8, height), layout="constrained")
    return figure, figure.add_subplot()
