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
def outgoing_address(slot: Any, phase: int, peer: int) -> int:
    """Where the first byte lies that is sent to `peer`."""
    if phase == 0:
        return int(slot[e.S_GRADIENT] + peer * slot[e.S_SHARD])
    return int(slot[e.S_REDUCED])


@compiled
def incoming_address(slot: Any, phase: int, peer: int) -> int:
    """Where the first byte goes that comes from `peer`."""
    if phase == 0:
        return int(slot[e.S_STAGING] + peer * slot[e.S_SHARD])
    return int(slot[e.S_GRADIENT] + peer * slot[e.S_SHARD])


def add_survivors(result: Any, own: Any, staged: Any, arrived: Any, rank: int, per_chunk: int) -> int:
    """Write to `result` the estimate of the sum over ranks; return how many contributions of a chunk are missing.

    With k of the other ranks' n contributions here it is own + n/k * (their sum). Where nothing is missing, that is
    the plain sum in the order of the ranks, and the same bits on every run.

    Args:
        result: Shape (N,), floating.
        own: This rank's, shape (N,).
        staged: The others', shape (P, N); the row of `rank`, and chunks that did not arrive, hold anything.
        arrived: Shape (P, chunks): which chunks of whose row hold data.
        rank: This one.
        per_chunk: Elements of a chunk; the last may be shorter.
    """
    ranks, chunks = arrived.shape
    others = [peer for peer in range(ranks) if peer != rank]
    first = own if rank == 0 else staged[0]
    np.copyto(result, first)
    for peer in range(1, ranks):
        result += own if peer == rank else staged[peer]
    here = arrived[others].astype(np.int64).sum(axis=0)
    for chunk in np.flatnonzero(here < ranks - 1):
        part = slice(chunk * per_chunk, (chunk + 1) * per_chunk)
        if here[chunk] == 0:
            result[part] = own[part] * ranks
            continue
        result[part] = 0
        for peer in others:
            if arrived[peer, chunk]:
                result[part] += staged[peer, part]
        result[part] *= (ranks - 1) / here[chunk]
        result[part] += own[part]
    return int((ranks - 1) * chunks - here.sum())
