"""Adasum: gradients, or updates, combined so that what they agree on is averaged and what they do not is added."""

from paceline.reductions.adasum.reduction import Adasum
from paceline.reductions.adasum.tree import combine

__all__ = ["Adasum", "combine"]
