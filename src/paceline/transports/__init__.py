"""MOVE messages: to which rank, how; not what they mean."""

from paceline.transports.transport import Message, Transport

__all__ = ["Message", "Transport"]
