"""Memory that the ranks of one host share.

arena.py      memory of one rank that the others have mapped; tensors are allocated in it
board.py      the words at its front: how far this rank has got, what it is about to do, whether it gave up
futex.py      waiting for a word to change, in the kernel
host.py       who is on the same host, and mapping their arenas
mailboxes.py  messages from one of them to another
meeting.py    all of them arrive, or one is named
"""

from paceline.transports.shared_memory.arena import Arena
from paceline.transports.shared_memory.board import Board
from paceline.transports.shared_memory.host import Host, join_host
from paceline.transports.shared_memory.mailboxes import SharedMemoryTransport
from paceline.transports.shared_memory.meeting import Meetings

__all__ = ["Arena", "Board", "Host", "Meetings", "SharedMemoryTransport", "join_host"]
