"""`compression="auto"`: measures steps and link, predicts, compares, and turns a codec on where steps get shorter."""

from paceline.reductions.auto.auto import Auto

__all__ = ["Auto"]
