"""Emulated clusters: hosts are network namespaces of one Linux machine; their links have a rate, loss and delay."""

from paceline_lab.emulation.cluster import Counters, EmulatedCluster, EmulatedHost
from paceline_lab.emulation.cluster_job import Outcome
from paceline_lab.emulation.cluster_spec import ClusterSpec
from paceline_lab.emulation.scenario import Change, Scenario

__all__ = ["Change", "ClusterSpec", "Counters", "EmulatedCluster", "EmulatedHost", "Outcome", "Scenario"]
