"""Settings that belong together: the large-minibatch recipe and the parts of a model that it changes."""

from paceline.recipes.ghost_batch_norm import GhostBatchNorm, convert_ghost_batchnorm
from paceline.recipes.initialization import init_output_layer, zero_init_residual
from paceline.recipes.large_minibatch import LargeMinibatch

__all__ = [
    "GhostBatchNorm",
    "LargeMinibatch",
    "convert_ghost_batchnorm",
    "init_output_layer",
    "zero_init_residual",
]
