"""Compares the ranks' batches and settings by an all-gather before a recipe sets rates; all ranks raise, or none."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from paceline.comm.collectives import all_gather, device_for_metadata
from paceline.data import GlobalBatch
from paceline.errors import ConfigurationError


def world(process_group: ProcessGroup | None) -> ProcessGroup | None:
    """The group given, or the default one; None where there is none, so that this process is alone."""
    if process_group is not None:
        return process_group
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


@dataclass(frozen=True)
class OwnPart:
    """One rank's batch and settings."""

    local: int  # its samples of a micro-step
    accumulation: int  # its micro-steps of a step
    settings: str  # its recipe as text; must be equal on all ranks
    problem: ConfigurationError | None = None  # why it cannot train by it

    def as_numbers(self) -> list[int]:
        """Return the numbers that ranks gather; a rank with a problem has no valid batch."""
        if self.problem is not None:
            return [0, 0, 0, 1]
        digest = hashlib.sha256(self.settings.encode()).digest()
        return [self.local, self.accumulation, int.from_bytes(digest[:8], "big", signed=True), 0]


def agree_on_batch(mine: OwnPart, process_group: ProcessGroup | None, device: torch.device) -> GlobalBatch:
    """Learn every rank's number of samples, compare recipes. Collective; blocks. ConfigurationError on all ranks."""
    group = world(process_group)
    ranks = [mine.as_numbers()]
    if group is not None and group.size() > 1:
        row = torch.tensor(mine.as_numbers(), dtype=torch.int64, device=device_for_metadata(group, device))
        rows = [torch.empty_like(row) for _ in range(group.size())]
        all_gather(rows, row, group).wait()
        ranks = [other.tolist() for other in rows]
    if mine.problem is not None:
        raise mine.problem
    for rank, (_, _, settings, has_problem) in enumerate(ranks):
        if has_problem:
            raise ConfigurationError(
                f"rank {rank} could not make its recipe, so none can: its own error says why. No rate was set."
            )
        if settings != ranks[0][2]:
            raise ConfigurationError(
                f"rank {rank} follows another recipe than rank 0 (this rank's: {mine.settings}). Build the recipe "
                "with the same rates and curve on every rank; only the local batch and its micro-steps may differ."
            )
    return GlobalBatch(tuple(row[0] for row in ranks), tuple(row[1] for row in ranks))
