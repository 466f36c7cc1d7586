"""Shared memory between the ranks of one host, and a barrier in it."""

from paceline.transports.shared_memory.arena import Arena, Status
from paceline.transports.shared_memory.barrier import HostBarrier
from paceline.transports.shared_memory.neighbours import Host, join_host

__all__ = ["Arena", "Host", "HostBarrier", "Status", "join_host"]
