"""A cluster of emulated hosts on one Linux machine: real kernels' TCP over links of a given rate, loss and delay."""

from paceline.lab.emulation.cluster import Counters, EmulatedCluster, EmulatedHost, clean, print_line
from paceline.lab.emulation.job import Outcome, check_script
from paceline.lab.emulation.spec import ClusterSpec

__all__ = [
    "ClusterSpec",
    "Counters",
    "EmulatedCluster",
    "EmulatedHost",
    "Outcome",
    "check_script",
    "clean",
    "print_line",
]
