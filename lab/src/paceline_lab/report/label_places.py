"""Places of a picture's labels, so that none lies on another: computed without matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

CHARACTER_IN, AXES_IN = 0.068, 5.0  # of a label; of axes, about: to tell whether labels meet


class End(NamedTuple):
    """The end of a line, in pixels and in its panel's units, and the label to write there."""

    at_x: float
    at_y: float
    x: float
    y: float
    text: str
    color: str


def columns(ends: Sequence[End], width: float) -> list[list[End]]:
    """Put ends that are nearer to each other than `width` into one column of labels."""
    columns: list[list[End]] = []
    for end in sorted(ends):
        if columns and end.at_x - columns[-1][0].at_x < width:
            columns[-1].append(end)
        else:
            columns.append([end])
    return columns


def rows_above(places: Mapping[str, float], most: float) -> dict[str, int]:
    """Return the row of each name above a panel, so that names on a row do not meet; the leftmost is lowest."""
    ends: list[float] = []
    found = {}
    for name, place in sorted(places.items(), key=lambda item: item[1]):
        half = 0.5 * len(name) * CHARACTER_IN / AXES_IN * most
        row = next((row for row, end in enumerate(ends) if end < place - half), len(ends))
        ends[row : row + 1] = [place + half]
        found[name] = row
    return found


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
