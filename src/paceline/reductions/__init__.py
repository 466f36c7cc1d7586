"""What combining the ranks' gradients means: the mean, Adasum, or whatever a communication hook does.

What few use is imported when it is first asked for (PEP 562): wrapping a model costs little on top of torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline.reductions.choice import choose_reduction
from paceline.reductions.hook import GradBucket, HookReduction
from paceline.reductions.mean import Mean
from paceline.reductions.narrow_mean import NarrowMean
from paceline.reductions.reduction import Message, Reduction

if TYPE_CHECKING:
    from paceline.reductions.adasum import Adasum
    from paceline.reductions.auto import Auto
    from paceline.reductions.compressed import Compressed
    from paceline.reductions.lossy import Lossy
    from paceline.reductions.noise_scale import GradientNoiseScale
    from paceline.reductions.powersgd import PowerSGD

__all__ = [
    "Adasum",
    "Auto",
    "Compressed",
    "GradBucket",
    "GradientNoiseScale",
    "HookReduction",
    "Lossy",
    "Mean",
    "Message",
    "NarrowMean",
    "PowerSGD",
    "Reduction",
    "choose_reduction",
]

_HOME_OF = {
    "Adasum": "adasum",
    "Auto": "auto",
    "Compressed": "compressed",
    "GradientNoiseScale": "noise_scale",
    "Lossy": "lossy",
    "PowerSGD": "powersgd",
}


def __getattr__(name: str) -> Any:
    """Import the public name `name` from its home on first use."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value
