"""What the optimizer does with a reduced gradient, and how its rate moves over time."""

from paceline.optim.lamb import LAMB
from paceline.optim.lars import LARS

__all__ = [
    "LAMB",
    "LARS",
]
