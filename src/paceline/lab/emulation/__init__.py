"""Emulated clusters: hosts are network namespaces of one Linux machine; their links have a rate, loss and delay."""

from paceline.lab.emulation.cluster import Counters, EmulatedCluster, EmulatedHost
from paceline.lab.emulation.cluster_job import Outcome
from paceline.lab.emulation.cluster_spec import ClusterSpec

__all__ = ["ClusterSpec", "Counters", "EmulatedCluster", "EmulatedHost", "Outcome"]
