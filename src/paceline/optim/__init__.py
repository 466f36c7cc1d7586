"""Optimizers, the learning rate over time, and the use of a reduced gradient before all of them have arrived."""

from paceline.optim.adasum_optimizer import AdasumOptimizer
from paceline.optim.lamb import LAMB
from paceline.optim.lars import LARS
from paceline.optim.learning_rate import (
    Curve,
    MomentumCorrection,
    rate_factor,
)
from paceline.optim.local_steps import DiLoCo, LocalSGD
from paceline.optim.overlap import overlap
from paceline.optim.parameter_groups import parameter_groups
from paceline.optim.shard import full_state_dict, shard

__all__ = [
    "LAMB",
    "LARS",
    "AdasumOptimizer",
    "Curve",
    "DiLoCo",
    "LocalSGD",
    "MomentumCorrection",
    "full_state_dict",
    "overlap",
    "parameter_groups",
    "rate_factor",
    "shard",
]
