"""`compression="auto"`: measure, predict, decide on all ranks alike, try, and keep watching."""

from paceline.reductions.auto.reduction import Auto

__all__ = ["Auto"]
