"""Samples that travel between ranks."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.svm.active import Active
from paceline.svm.samples import Samples
from paceline.svm.world import World

_S = TypeVar("_S", bound=Samples)
_COPIES = 3  # of the samples that a solver keeps, at most


def from_everyone(world: World, mine: _S, doing: str) -> _S:
    """Every rank's samples on every rank, rank after rank. Collective."""
    if world.num_ranks == 1:
        return mine
    ids = np.concatenate(world.gather_uneven(mine.ids, doing))
    arrays = [np.concatenate(world.gather_uneven(part.ravel(), doing)) for part in mine.to_arrays()]
    return mine.from_arrays(ids, arrays)


def balanced(world: World, active: Active, counts: NDArray[np.int64]) -> Active:
    """Active samples dealt out evenly: ranks with too many hand over their last ones. Collective.

    Args:
        world: The ranks.
        active: This rank's.
        counts: How many every rank has.
    """
    doing = "balancing the active samples"
    quotas = np.full(len(counts), counts.sum() // len(counts))
    quotas[: counts.sum() % len(counts)] += 1
    gives, takes = np.maximum(counts - quotas, 0), np.maximum(quotas - counts, 0)
    stay = len(active) - int(gives[world.rank])
    moving = active.take(np.arange(stay, len(active)))
    samples = from_everyone(world, moving.samples, doing)
    width = moving.columns().shape[1]
    columns = np.concatenate(world.gather_uneven(moving.columns().ravel(), doing)).reshape(-1, width)
    first = int(takes[: world.rank].sum())
    mine = slice(first, first + int(takes[world.rank]))
    return active.take(np.arange(stay)).joined(samples.take(mine), columns[mine])


def fits(world: World, samples: Samples, cache_bytes: float) -> bool:
    """Whether every rank may hold all samples as part of its cache. Collective."""
    num_bytes = sum(array.size for array in samples.to_arrays()) * 8.0
    return bool(world.total(np.array([num_bytes]), "adding up the samples")[0] * _COPIES <= cache_bytes)
