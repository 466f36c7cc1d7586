"""Transports send and receive messages between ranks: over a c10d group, or in one process."""

from paceline.transports.transport import Message, Subset, Transport

__all__ = ["Message", "Subset", "Transport"]
