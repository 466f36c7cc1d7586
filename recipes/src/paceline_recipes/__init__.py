"""Large batches and rare exchanges: rates, LARS, LAMB, parts of a model, a measure of the batch, local steps."""

from paceline_recipes.lamb import LAMB
from paceline_recipes.large_minibatch import LargeMinibatch
from paceline_recipes.lars import LARS
from paceline_recipes.learning_rate import Curve, MomentumCorrection, rate_factor
from paceline_recipes.local_steps import DiLoCo, LocalSGD
from paceline_recipes.model_parts import (
    GhostBatchNorm,
    convert_ghost_batchnorm,
    init_output_layer,
    zero_init_residual,
)
from paceline_recipes.noise_scale import GradientNoiseScale
from paceline_recipes.parameter_groups import parameter_groups

__all__ = [
    "LAMB",
    "LARS",
    "Curve",
    "DiLoCo",
    "GhostBatchNorm",
    "GradientNoiseScale",
    "LargeMinibatch",
    "LocalSGD",
    "MomentumCorrection",
    "convert_ghost_batchnorm",
    "init_output_layer",
    "parameter_groups",
    "rate_factor",
    "zero_init_residual",
]
