"""How every figure looks: its width and fonts, and the one name and colour that each side has in all of them.

A side keeps its colour from picture to picture: Paceline is blue, what it is compared with first (torch, Gloo,
scikit-learn) orange, other peers have colours of their own, published figures are gray and dashed. A side with an
option ("ours-bf16") has a lighter tint of its family's colour.
"""

from __future__ import annotations

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
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "savefig.dpi": 150,
}

OURS, BASELINE, PAPER, LIMIT = "#0b64ad", "#e08214", "#7a7a7a", "#333333"
_OURS_TINT, _BASELINE_TINT = "#6aaee0", "#f7bd78"
_GREEN, _PURPLE, _BROWN = "#2a9d5c", "#8e5ab5", "#a0522d"
COMMUNICATION = "#c0392b"  # what overlap hides, in bars of a step's parts
PART_COLORS = {
    "forward": "#cfcfcf",
    "backward": "#9d9d9d",
    "communication": COMMUNICATION,
    "exposed communication": COMMUNICATION,
    "optimizer": "#5f5f5f",
    "other": "#e9e2d0",
}


@dataclass(frozen=True)
class Look:
    """What a side is called in pictures, and its colour."""

    name: str
    color: str


_LOOKS = {
    "ours": Look("Paceline", OURS),
    "torch": Look("torch", BASELINE),
    "gloo": Look("Gloo", BASELINE),
    "paceline": Look("Paceline", OURS),
    "paceline-staged": Look("Paceline, ordinary tensors", _OURS_TINT),
    "mpi4py": Look("Open MPI", _PURPLE),
    "deepspeed": Look("DeepSpeed", _GREEN),
    "accelerate": Look("Accelerate", _BROWN),
    "torchft": Look("torchft", _PURPLE),
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
    "int8": Look("always int8", _PURPLE),
}
_FAMILIES = {
    "ours": ("Paceline", _OURS_TINT),
    "paceline": ("Paceline", _OURS_TINT),
    "torch": ("torch", _BASELINE_TINT),
}
# Of curves and rows that are no side, in order.
CURVE_COLORS = (OURS, BASELINE, _GREEN, _PURPLE, _BROWN, PAPER)
ROW_COLORS = (
    _BASELINE_TINT,
    BASELINE,
    COMMUNICATION,
    "#17a2b8",
    OURS,
    _GREEN,
    _PURPLE,
    _BROWN,
    "#d977b5",
    PAPER,
)


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
    """Return what a workload is called in pictures."""
    return _WORKLOADS.get(workload, workload)
