"""Which bytes of a vector are which rank's shard and which chunk; and the sum over those that arrived."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.transports.bounded_loss import endpoint_state as e
from paceline.transports.bounded_loss.machine_code import compiled


@compiled
def shard_bytes(slot: Any, rank: int) -> int:
    """Length of a rank's shard; the last ones may be shorter, or empty."""
    return int(max(0, min(slot[e.S_SHARD], slot[e.S_BYTES] - rank * slot[e.S_SHARD])))


@compiled
def num_chunks(num_bytes: int, payload: int) -> int:
    """Datagrams for so many bytes."""
    return (num_bytes + payload - 1) // payload


@compiled
def mask_bytes(slot: Any, owner: int, ranks: int, payload: int) -> int:
    """Length of the mask behind a reduced shard: a bit for every rank and chunk, a whole number of bytes a rank."""
    if slot[e.S_BOUND_PPM] == 0:
        return 0
    return int(ranks * ((num_chunks(shard_bytes(slot, owner), payload) + 7) // 8))


@compiled
def transfer_chunks(slot: Any, phase: int, owner: int, ranks: int, payload: int) -> int:
    """Datagrams of a transfer of `owner`'s shard; in phase 1 with the mask, which begins with a chunk of its own."""
    chunks = num_chunks(shard_bytes(slot, owner), payload)
    if phase == 1:
        chunks += num_chunks(mask_bytes(slot, owner, ranks, payload), payload)
    return int(chunks)


@compiled
def chunk_bytes(slot: Any, phase: int, owner: int, ranks: int, payload: int, chunk: int) -> int:
    """Length of a chunk of a transfer of `owner`'s shard."""
    size = shard_bytes(slot, owner)
    data = num_chunks(size, payload)
    if phase == 0 or chunk < data:
        return int(min(payload, size - chunk * payload))
    return int(min(payload, mask_bytes(slot, owner, ranks, payload) - (chunk - data) * payload))


@compiled
def outgoing_address(slot: Any, phase: int, peer: int) -> int:
    """Where the first byte lies that is sent to `peer`."""
    if phase == 0:
        return int(slot[e.S_GRADIENT] + peer * slot[e.S_SHARD])
    return int(slot[e.S_REDUCED])


@compiled
def incoming_address(slot: Any, phase: int, peer: int, payload: int, chunk: int) -> int:
    """Where a chunk goes that comes from `peer`."""
    if phase == 0:
        return int(slot[e.S_STAGING] + peer * slot[e.S_SHARD] + chunk * payload)
    data = num_chunks(shard_bytes(slot, peer), payload)
    if chunk < data:
        return int(slot[e.S_GRADIENT] + peer * slot[e.S_SHARD] + chunk * payload)
    return int(slot[e.S_MASKS] + peer * slot[e.S_MASK_ROOM] + (chunk - data) * payload)


def add_survivors(
    result: Any, own: Any, staged: Any, arrived: Any, rank: int, per_chunk: int, is_scaled: bool
) -> None:
    """Write to `result` the sum over ranks of what arrived, or with `is_scaled` the estimate of the sum of all.

    With k of the other ranks' n contributions here the estimate is own + n/k * (their sum). Where nothing is missing,
    both are the plain sum in the order of the ranks, and the same bits on every run.

    Args:
        result: Shape (N,), floating.
        own: This rank's, shape (N,).
        staged: The others', shape (P, N); the row of `rank`, and chunks that did not arrive, hold anything.
        arrived: Shape (P, chunks): which chunks of whose row hold data.
        rank: This one.
        per_chunk: Elements of a chunk; the last may be shorter.
        is_scaled: Whether to make up for what is missing.
    """
    ranks = len(arrived)
    others = [peer for peer in range(ranks) if peer != rank]
    first = own if rank == 0 else staged[0]
    np.copyto(result, first)
    for peer in range(1, ranks):
        result += own if peer == rank else staged[peer]
    here = arrived[others].astype(np.int64).sum(axis=0)
    for chunk in np.flatnonzero(here < ranks - 1):
        part = slice(chunk * per_chunk, (chunk + 1) * per_chunk)
        if here[chunk] == 0 and is_scaled:
            result[part] = own[part] * ranks
            continue
        result[part] = 0
        for peer in others:
            if arrived[peer, chunk]:
                result[part] += staged[peer, part]
        if is_scaled:
            result[part] *= (ranks - 1) / here[chunk]
        result[part] += own[part]


def lost_ranges(missing: Any, owner_first: int, owner_stop: int, per_chunk: int) -> Any:
    """Return what of a shard is missing: a row a lost chunk, shape (L, 3): source rank, first element, end.

    Args:
        missing: Shape (P, chunks): of whom which chunk is missing.
        owner_first: The shard's first element in the vector.
        owner_stop: Its end.
        per_chunk: Elements of a chunk.
    """
    sources, chunks = np.nonzero(missing)
    first = owner_first + chunks * per_chunk
    return np.stack([sources, first, np.minimum(first + per_chunk, owner_stop)], axis=1)
