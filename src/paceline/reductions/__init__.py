"""What combining the ranks' gradients means: the mean, Adasum, or whatever a communication hook does."""

from paceline.reductions.adasum import Adasum
from paceline.reductions.auto import Auto
from paceline.reductions.choice import choose_reduction
from paceline.reductions.compressed import Compressed
from paceline.reductions.hook import GradBucket, HookReduction
from paceline.reductions.lossy import Lossy
from paceline.reductions.mean import Mean
from paceline.reductions.narrow_mean import NarrowMean
from paceline.reductions.noise_scale import GradientNoiseScale
from paceline.reductions.pending import Pending
from paceline.reductions.powersgd import PowerSGD
from paceline.reductions.reduction import Message, Reduction
from paceline.reductions.roll_call import RollCall
from paceline.reductions.traffic import Traffic

__all__ = [
    "Adasum",
    "Auto",
    "Compressed",
    "GradBucket",
    "GradientNoiseScale",
    "HookReduction",
    "Lossy",
    "Mean",
    "Message",
    "NarrowMean",
    "Pending",
    "PowerSGD",
    "Reduction",
    "RollCall",
    "Traffic",
    "choose_reduction",
]
