"""How the ranks' gradients are combined: a mean (plain, compressed, with bounded loss, by servers), Adasum, or a hook.

Most classes are imported on first access (PEP 562), so that wrapping a model costs little on top of importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline.reductions.by_name import choose_reduction
from paceline.reductions.hook import GradBucket, HookReduction
from paceline.reductions.mean import Mean, NarrowMean
from paceline.reductions.reduction import Message, Reduction

if TYPE_CHECKING:
    from paceline.reductions.adasum import Adasum
    from paceline.reductions.auto import Auto
    from paceline.reductions.bounded_loss_mean import BoundedLoss
    from paceline.reductions.compressed import Compressed
    from paceline.reductions.loss_report import LossReport
    from paceline.reductions.lossy import Lossy
    from paceline.reductions.noise_scale import GradientNoiseScale
    from paceline.reductions.parameter_servers import ParameterServers
    from paceline.reductions.powersgd import PowerSGD

__all__ = [
    "Adasum",
    "Auto",
    "BoundedLoss",
    "Compressed",
    "GradBucket",
    "GradientNoiseScale",
    "HookReduction",
    "LossReport",
    "Lossy",
    "Mean",
    "Message",
    "NarrowMean",
    "ParameterServers",
    "PowerSGD",
    "Reduction",
    "choose_reduction",
]

_HOME_OF = {
    "Adasum": "adasum",
    "Auto": "auto",
    "BoundedLoss": "bounded_loss_mean",
    "Compressed": "compressed",
    "GradientNoiseScale": "noise_scale",
    "LossReport": "loss_report",
    "Lossy": "lossy",
    "ParameterServers": "parameter_servers",
    "PowerSGD": "powersgd",
}


def __getattr__(name: str) -> Any:
    """Import `name` from its module on first access."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value
