"""The global batch, and the sampler that divides a shuffled data set among ranks."""

from paceline.data.global_batch import GlobalBatch
from paceline.data.global_shuffle import GlobalShuffle

__all__ = ["GlobalBatch", "GlobalShuffle"]
