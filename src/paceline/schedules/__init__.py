"""Collective algorithms (ring, tree, halving-doubling, ...) as data: who sends what to whom in which round.

With their price in rounds, bytes and seconds, and the choice between them. Pure Python: no torch, clock or network.
"""

from paceline.schedules.algorithms import SCHEDULES, Algorithm, Choice, choose
from paceline.schedules.price import Price, price
from paceline.schedules.schedule import Round, Schedule, Transfer, cut
from paceline.schedules.topology import Link, Links, Topology

__all__ = [
    "SCHEDULES",
    "Algorithm",
    "Choice",
    "Link",
    "Links",
    "Price",
    "Round",
    "Schedule",
    "Topology",
    "Transfer",
    "choose",
    "cut",
    "price",
]
