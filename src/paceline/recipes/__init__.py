"""Settings that belong together: the large-minibatch recipe and the parts of a model that it changes."""

from paceline.recipes.large_minibatch import LargeMinibatch
from paceline.recipes.model_parts import (
    GhostBatchNorm,
    convert_ghost_batchnorm,
    init_output_layer,
    zero_init_residual,
)

__all__ = [
    "GhostBatchNorm",
    "LargeMinibatch",
    "convert_ghost_batchnorm",
    "init_output_layer",
    "zero_init_residual",
]
