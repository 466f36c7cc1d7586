"""What combining the ranks' gradients means: the mean, Adasum, or whatever a communication hook does."""

from paceline.reductions.adasum import Adasum
from paceline.reductions.choice import choose_reduction
from paceline.reductions.hook import GradBucket, HookReduction
from paceline.reductions.mean import Mean
from paceline.reductions.narrow_mean import NarrowMean
from paceline.reductions.pending import Pending
from paceline.reductions.reduction import Message, Reduction
from paceline.reductions.roll_call import RollCall

__all__ = [
    "Adasum",
    "GradBucket",
    "HookReduction",
    "Mean",
    "Message",
    "NarrowMean",
    "Pending",
    "Reduction",
    "RollCall",
    "choose_reduction",
]
