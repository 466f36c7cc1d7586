"""Combinations of the ranks' gradients: a mean, plain or compressed, or a hook.

Most classes are imported on first access (PEP 562), so that wrapping a model costs little on top of importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.late_imports import on_first_use
from paceline.reductions.by_name import choose_reduction
from paceline.reductions.hook import GradBucket, HookReduction
from paceline.reductions.reduction import (
    Mean,
    Message,
    NarrowMean,
    Reduction,
    StepEnd,
    Traffic,
    all_reduced,
    launch_sparse_sum,
    real_numel,
)

if TYPE_CHECKING:
    from paceline.reductions.auto import Auto
    from paceline.reductions.compressed import Compressed
    from paceline.reductions.kept_state import Keeper, Memory, Slot, check_one_model
    from paceline.reductions.lossy import Lossy
    from paceline.reductions.powersgd import PowerSGD

__all__ = [
    "Auto",
    "Compressed",
    "GradBucket",
    "HookReduction",
    "Keeper",
    "Lossy",
    "Mean",
    "Memory",
    "Message",
    "NarrowMean",
    "PowerSGD",
    "Reduction",
    "Slot",
    "StepEnd",
    "Traffic",
    "all_reduced",
    "check_one_model",
    "choose_reduction",
    "launch_sparse_sum",
    "real_numel",
]

__getattr__ = on_first_use(
    __name__,
    {
        "auto": "Auto",
        "compressed": "Compressed",
        "kept_state": "Keeper Memory Slot check_one_model",
        "lossy": "Lossy",
        "powersgd": "PowerSGD",
    },
)
