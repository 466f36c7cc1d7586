"""Transports send and receive messages between ranks: over a c10d group, or in one process.

A lossy one sums vectors over UDP, and says what was lost.
"""

from paceline.transports.lossy_transport import Bound, Losses, LossyTransport, Sum
from paceline.transports.transport import Message, Subset, Transport

__all__ = ["Bound", "Losses", "LossyTransport", "Message", "Subset", "Sum", "Transport"]
