"""The c10d backend `paceline`: a ProcessGroup that performs collectives through shared memory and between hosts."""

from paceline.process_group.registration import register

__all__ = ["register"]
