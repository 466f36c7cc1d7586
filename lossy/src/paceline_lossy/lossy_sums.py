"""Sums the contributions to a shard that arrived, makes up for the others, and reports the lost ones."""

from __future__ import annotations

from typing import Any

import numpy as np


def add_survivors(
    result: Any, own: Any, staged: Any, arrived: Any, rank: int, per_chunk: int, is_scaled: bool
) -> None:
    """Write to `result` the sum of the contributions that arrived, or with `is_scaled` an estimate of the sum of all.

    If k of the other ranks' n contributions arrived, the estimate is own + n/k * (their sum). If none arrived, it is
    own + n * own, or zero without an own contribution. If nothing is missing, both are the plain sum in the order of
    the ranks, and the same bits on every run.

    Args:
        result: Shape (N,), floating.
        own: This rank's contribution, shape (N,). None: this rank contributes nothing, and all rows are others'.
        staged: The others' contributions, shape (P, N). The row of `rank` and missing chunks are undefined.
        arrived: Shape (P, chunks): which chunks of each row hold data.
        rank: This rank.
        per_chunk: Elements of a chunk; the last may be shorter.
        is_scaled: Whether to make up for missing contributions.
    """
    ranks = len(arrived)
    given = [own if own is not None and peer == rank else staged[peer] for peer in range(ranks)]
    others = [peer for peer in range(ranks) if own is None or peer != rank]
    if ranks == 1:
        np.copyto(result, given[0])
    else:
        np.add(given[0], given[1], out=result)
    for values in given[2:]:
        result += values
    here = arrived[others].astype(np.int64).sum(axis=0)
    for chunk in np.flatnonzero(here < len(others)):
        part = slice(chunk * per_chunk, (chunk + 1) * per_chunk)
        if here[chunk] == 0 and is_scaled and own is not None:
            result[part] = own[part] * ranks
            continue
        result[part] = 0
        for peer in others:
            if arrived[peer, chunk]:
                result[part] += staged[peer, part]
        if is_scaled and here[chunk]:
            result[part] *= len(others) / here[chunk]
        if own is not None:
            result[part] += own[part]


def lost_ranges(missing: Any, owner_first: int, owner_stop: int, per_chunk: int) -> Any:
    """Return the missing parts of a shard, shape (L, 3): one row per lost chunk, with source rank, first element, end.

    `missing` has shape (P, chunks). The shard is elements `owner_first` to `owner_stop` of the vector.
    """
    sources, chunks = np.nonzero(missing)
    first = owner_first + chunks * per_chunk
    return np.stack([sources, first, np.minimum(first + per_chunk, owner_stop)], axis=1)
