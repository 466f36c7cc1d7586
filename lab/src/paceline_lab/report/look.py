"""Style of every figure: its width and fonts, and one name and colour for each side in all of them.

A side keeps its colour from picture to picture. Paceline is blue, and the first baseline (torch, Gloo, scikit-learn)
is orange. Other peers have colours of their own; published figures are gray and dashed. A side with an option
("ours-bf16") has a lighter tint of its family's colour. The colours are those of Okabe and Ito, which colour-blind
readers tell apart. Each has its own marker as well, for paper without colours. Text is a darker shade, see
`text_color`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WIDTH_IN = 7.2  # of every figure; 9 points then read like the text of a page of documentation
STYLE: dict[str, Any] = {
    "figure.titlesize": 11,
    "figure.titleweight": "bold",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.0,
    "text.color": "#1f2328",
    "axes.labelcolor": "#1f2328",
    "axes.edgecolor": "#6e7781",
    "xtick.color": "#6e7781",
    "ytick.color": "#6e7781",
    "xtick.labelcolor": "#1f2328",
    "ytick.labelcolor": "#1f2328",
    "grid.color": "#8c959f",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "savefig.dpi": 150,
    "svg.fonttype": "none",  # text stays text: small, and can be searched
    "svg.hashsalt": "paceline",  # the same picture is the same file
    "font.family": ["DejaVu Sans"],
}

OURS, BASELINE, PAPER, LIMIT = "#0072b2", "#e69f00", "#7a7a7a", "#333333"
_OURS_TINT, _BASELINE_TINT = "#56b4e9", "#f3d28a"
_GREEN, _PINK, _RED = "#009e73", "#cc79a7", "#d55e00"
COMMUNICATION = _RED  # what overlap hides, in bars of a step's parts
PART_COLORS = {
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "communication": COMMUNICATION,
    "exposed communication": COMMUNICATION,
    "optimizer": "#009e73",
    "other": "#bbbbbb",
    "computes": "#0072b2",
    "waits": "#d0d0d0",
}


@dataclass(frozen=True)
class Look:
    """The name and the colour of a side in pictures."""

    name: str
    color: str

    @property
    def option(self) -> str:
        """Return the option by which this side differs from its family, or its name if it has no option."""
        return self.name.partition(", ")[2] or self.name


_LOOKS = {
    "ours": Look("Paceline", OURS),
    "torch": Look("torch", BASELINE),
    "gloo": Look("Gloo", BASELINE),
    "paceline": Look("Paceline", OURS),
    "paceline-copied": Look("Paceline, ordinary tensors", _OURS_TINT),
    "paceline-backend": Look("Paceline over its backend", _OURS_TINT),
    "mpi4py": Look("Open MPI", _PINK),
    "deepspeed": Look("DeepSpeed", _GREEN),
    "accelerate": Look("Accelerate", _RED),
    "torchft": Look("torchft", _PINK),
    "sklearn": Look("scikit-learn", BASELINE),
    "sklearnex": Look("Intel's extension", _GREEN),
    "one": Look("Paceline", OURS),
    "ranks": Look("Paceline, 2 processes", _OURS_TINT),
    "none": Look("no data parallelism", PAPER),
    "torch-view": Look("torch, gradient_as_bucket_view", _BASELINE_TINT),
    "torch-batched": Look("torch, batched_grad_copy", _BASELINE_TINT),
    "torch-static": Look("torch, static_graph", _BASELINE_TINT),
    "torch-unused": Look("torch, find_unused_parameters", _BASELINE_TINT),
    "ours-unused": Look("Paceline, find_unused_parameters", _OURS_TINT),
    "ours-agreed": Look("Paceline, unused ones left out", _OURS_TINT),
    "ours-skip": Look("Paceline, model.skip", OURS),
    "ours-forward": Look("Paceline, overlap_forward", _OURS_TINT),
    "torch-fp16": Look("torch, fp16 hook", _BASELINE_TINT),
    "torch-powersgd": Look("torch, PowerSGD hook", _BASELINE_TINT),
    "torch-paceline": Look("torch over backend paceline", _BASELINE_TINT),
    "ours-paceline": Look("Paceline over its backend", _OURS_TINT),
    # Of `compression="auto"` and what it chooses among.
    "auto": Look('"auto"', OURS),
    "auto-any": Look('"auto", any codec', _OURS_TINT),
    "bf16": Look("always bf16", _GREEN),
    "int8": Look("always int8", _PINK),
}
_FAMILIES = {
    "ours": ("Paceline", _OURS_TINT),
    "paceline": ("Paceline", _OURS_TINT),
    "torch": ("torch", _BASELINE_TINT),
}
# Of curves and rows that are no side, in order.
CURVE_COLORS = (OURS, BASELINE, _GREEN, _PINK, _RED, PAPER)
ROW_COLORS = (_BASELINE_TINT, BASELINE, _RED, _OURS_TINT, OURS, _GREEN, _PINK, LIMIT, "#a6761d", PAPER)
_MARKERS = {
    OURS: "o",
    BASELINE: "s",
    _GREEN: "^",
    _PINK: "D",
    _RED: "v",
    PAPER: "x",
    _OURS_TINT: "P",
    _BASELINE_TINT: "X",
    LIMIT: "<",
}


def marker_of(color: str) -> str:
    """Return the marker of a colour, so that lines also differ without it."""
    return _MARKERS.get(color, "*")


TEXT_CONTRAST, SHAPE_CONTRAST = 4.5, 3.0  # WCAG's least


def text_color(color: str) -> str:
    """Return the colour, darkened until text in it is read on white: a contrast of 4.5."""
    return _with_contrast(color, "#ffffff", 0.0)


def on_dark(color: str, least: float = TEXT_CONTRAST) -> str:
    """Return what stands for a colour on a dark page: grays are inverted, others lightened to a contrast of `least`.

    Text that was darkened for white pages gets its series' own colour again.
    """
    color = next((bright for bright in (*CURVE_COLORS, *ROW_COLORS) if text_color(bright) == color), color)
    red, green, blue = _channels(color)
    if max(red, green, blue) - min(red, green, blue) < 0.04:
        level = 1 - red * 0.93
        return _hex((level, level, level)) if red < 0.98 else DARK_PAGE
    return _with_contrast(color, SITE_DARK_PAGE, 1.0, least)


DARK_PAGE = "#0d1117"  # GitHub's
SITE_DARK_PAGE = "#1e2129"  # the documentation's, the lightest that pictures lie on


def _with_contrast(color: str, page: str, goal: float, least: float = TEXT_CONTRAST) -> str:
    """Mix a colour with black (0) or white (1) until it stands out."""
    for step in range(20):
        mixed = tuple(channel + (goal - channel) * step / 20 for channel in _channels(color))
        found = _hex(mixed)
        if _contrast(found, page) >= least:
            return found
    return _hex((goal,) * 3)


def _contrast(one: str, other: str) -> float:
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(color: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in _channels(color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _channels(color: str) -> tuple[float, float, float]:
    return (int(color[1:3], 16) / 255, int(color[3:5], 16) / 255, int(color[5:7], 16) / 255)


def _hex(channels: Sequence[float]) -> str:
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)


def look_of(side: str) -> Look:
    """Return a side's look; a side that is not in the table takes its family's, and its option as part of its name."""
    plain, again, number = side.partition(" (")
    look = _LOOKS.get(plain)
    if look is None:
        family, _, option = plain.partition("-")
        name, color = _FAMILIES.get(family, (plain, PAPER))
        look = Look(f"{name}, {option}" if option else name, color)
    return Look(look.name + again + number, look.color)


_WORKLOADS = {
    "tiny": "1,000 small parameters",
    "wide_mlp": "wide MLP",
    "resnet50": "ResNet-50",
    "transformer": "transformer",
    "mlstm": "mLSTM",
    "bert": "BERT",
}


def workload_name(workload: str) -> str:
    """Return the name of a workload in pictures."""
    return _WORKLOADS.get(workload, workload)
