"""WHO sends what to whom, in which round: collectives as data, their price, and the choice between them.

Pure Python: no tensors, no clock, no network.
"""

from paceline.schedules.choice import Choice, choose
from paceline.schedules.price import Price, price
from paceline.schedules.schedule import Round, Schedule, Transfer, cut
from paceline.schedules.table import SCHEDULES, Algorithm, Operation
from paceline.schedules.topology import Link, Links, Topology

__all__ = [
    "SCHEDULES",
    "Algorithm",
    "Choice",
    "Link",
    "Links",
    "Operation",
    "Price",
    "Round",
    "Schedule",
    "Topology",
    "Transfer",
    "choose",
    "cut",
    "price",
]
