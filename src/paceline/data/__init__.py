"""Global batches of a shuffled data set or a stream, how they are divided among ranks, and how much each rank gets."""

from paceline.data.balance import Balance, StepWork
from paceline.data.epoch_plan import StepCut
from paceline.data.global_batch import GlobalBatch
from paceline.data.global_batches import GlobalBatches
from paceline.data.global_shuffle import GlobalShuffle
from paceline.data.global_stream import GlobalStream
from paceline.data.token_shuffle import TokenShuffle

__all__ = [
    "Balance",
    "GlobalBatch",
    "GlobalBatches",
    "GlobalShuffle",
    "GlobalStream",
    "StepCut",
    "StepWork",
    "TokenShuffle",
]
