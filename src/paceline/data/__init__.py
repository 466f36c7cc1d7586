"""The global batch, the sampler that divides a shuffled data set among ranks, and who gets how much of it."""

from paceline.data.balance import Balance, Work
from paceline.data.epoch_plan import StepCut
from paceline.data.global_batch import GlobalBatch
from paceline.data.global_shuffle import GlobalShuffle

__all__ = ["Balance", "GlobalBatch", "GlobalShuffle", "StepCut", "Work"]
