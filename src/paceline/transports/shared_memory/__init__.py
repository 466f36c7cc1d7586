"""Shared memory between the ranks of one host, and a barrier in it.

arena.py       memory of one rank that the others have mapped; tensors are allocated in it, and at its front lie words:
               how far this rank has got, what it announces, whether it gave up
neighbours.py  which ranks are on this host, and mapping their arenas
barrier.py     a barrier with a timeout that names the missing rank
futex.py       sleeping until a word changes, in the kernel
"""

from paceline.transports.shared_memory.arena import Arena, Status
from paceline.transports.shared_memory.barrier import HostBarrier
from paceline.transports.shared_memory.neighbours import Host, join_host

__all__ = ["Arena", "Host", "HostBarrier", "Status", "join_host"]
