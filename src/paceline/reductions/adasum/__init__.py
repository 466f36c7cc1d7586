"""Adasum: combines gradients or updates so that parallel ones are averaged and orthogonal ones added."""

from paceline.reductions.adasum.adasum import Adasum
from paceline.reductions.adasum.local_tree import combine

__all__ = ["Adasum", "combine"]
