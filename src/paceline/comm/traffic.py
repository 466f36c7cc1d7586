"""Counts of the bytes that a rank sends for its gradients, and would send without compression."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """The bytes that one rank sent."""

    sent_bytes: int = 0  # for gradients, as payloads
    # what an all-reduce of the same gradients sends that is optimal in bytes, 2 (P-1)/P of their size
    plain_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent_bytes + other.sent_bytes, self.plain_bytes + other.plain_bytes)

    @property
    def saved_bytes(self) -> int:
        """Negative where compression makes messages longer: gathering on many ranks may."""
        return self.plain_bytes - self.sent_bytes


def all_reduced(num_bytes: int, num_ranks: int) -> int:
    """Return the bytes that each rank sends when so many are all-reduced."""
    return 2 * (num_ranks - 1) * num_bytes // num_ranks


def gathered(num_bytes: int, num_ranks: int) -> int:
    """Return the bytes that each rank sends when each receives so many from each other."""
    return (num_ranks - 1) * num_bytes
