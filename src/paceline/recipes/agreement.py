"""What the ranks must agree on before a recipe sets any rate: one small exchange, with an error on every rank."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from paceline.data import GlobalBatch
from paceline.errors import ConfigurationError
from paceline.reductions.collectives import device_for_words, launch_gather


def world(process_group: ProcessGroup | None) -> ProcessGroup | None:
    """The group given, or the default one; None where there is none, so that this process is alone."""
    if process_group is not None:
        return process_group
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def agree_on_batch(
    local: int, accumulation: int, settings: str, process_group: ProcessGroup | None, device: torch.device
) -> GlobalBatch:
    """Learn how many samples every rank trains, and make sure that all follow one recipe.

    Args:
        local: This rank's samples of a micro-step.
        accumulation: Its micro-steps of a step.
        settings: The recipe in words; must be equal on all ranks.
        process_group: Over whom.
        device: Of the model.

    Contract:
        Collective: every rank.  Blocks: yes.

    Raises:
        ConfigurationError: On every rank, naming the rank that differs or asks for the impossible.
    """
    group = world(process_group)
    if group is None or group.size() == 1:
        return GlobalBatch((local,), accumulation)
    digest = hashlib.sha256(settings.encode()).digest()
    words = [local, accumulation, int.from_bytes(digest[:8], "big", signed=True)]
    row = torch.tensor(words, dtype=torch.int64, device=device_for_words(group, device))
    rows = [torch.empty_like(row) for _ in range(group.size())]
    launch_gather(rows, row, group).wait()
    ranks = [other.tolist() for other in rows]
    for rank, (_, micro_steps, words_of_rank) in enumerate(ranks):
        if micro_steps != ranks[0][1]:
            raise ConfigurationError(
                f"rank {rank} accumulates {micro_steps} micro-steps a step, rank 0 {ranks[0][1]}. Give every rank "
                f"the same "
                "accumulation; ranks of different speed get different local batches."
            )
        if words_of_rank != ranks[0][2]:
            raise ConfigurationError(
                f"rank {rank} follows another recipe than rank 0 (this rank's: {settings}). Build the recipe with the "
                "same rates, batches and curve on every rank; only local_batch may differ."
            )
    return GlobalBatch(tuple(row[0] for row in ranks), accumulation)
