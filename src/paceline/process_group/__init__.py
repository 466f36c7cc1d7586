"""PERFORM a collective on tensors: the c10d backend `paceline`."""

from paceline.process_group.registration import NAME, register

__all__ = ["NAME", "register"]
