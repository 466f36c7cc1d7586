"""Whose samples are these? The global batch, and how the data set's order is cut among ranks."""

from paceline.data.global_batch import GlobalBatch
from paceline.data.global_shuffle import GlobalShuffle

__all__ = ["GlobalBatch", "GlobalShuffle"]
