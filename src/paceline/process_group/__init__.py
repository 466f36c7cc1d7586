"""PERFORM a schedule on tensors: the c10d backend `paceline`."""

from paceline.process_group.backend import NAME, ProcessGroup, register

__all__ = ["NAME", "ProcessGroup", "register"]
