"""Which bytes of a vector are which rank's shard and which chunk; compiled; and the sum over those that arrived."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from paceline.transports.bounded_loss import endpoint_state as e
from paceline.transports.bounded_loss.machine_code import compiled, pointer


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


@compiled
def copy_bytes(source: int, target: int, num_bytes: int) -> None:
    """Copy memory by address; whole words first."""
    words = num_bytes // 4
    from_words = numba.carray(pointer(source), words, dtype=np.uint32)
    to_words = numba.carray(pointer(target), words, dtype=np.uint32)
    to_words[:] = from_words
    for i in range(words * 4, num_bytes):
        numba.carray(pointer(target + i), 1, dtype=np.uint8)[0] = numba.carray(
            pointer(source + i), 1, dtype=np.uint8
        )[0]


@compiled
def add_survivors(result: Any, own: Any, staged: Any, arrived: Any, rank: int) -> int:
    """Write to `result` the estimate of the sum over ranks of one chunk; return how many contributions are missing.

    With k of the other ranks' n contributions here it is own + n/k * (their sum). Where nothing is missing, that is
    the plain sum in the order of the ranks, and the same bits on every run.

    Args:
        result: Shape (N,), floating.
        own: This rank's, shape (N,).
        staged: The others', shape (P, N); the row of `rank`, and rows that did not arrive, hold anything.
        arrived: Shape (P,): whose row holds data.
        rank: This one.
    """
    ranks = arrived.shape[0]
    here = 0
    for peer in range(ranks):
        if peer != rank and arrived[peer]:
            here += 1
    missing = ranks - 1 - here
    result[:] = 0
    for peer in range(ranks):
        if peer == rank:
            if missing == 0:
                result += own
        elif arrived[peer]:
            result += staged[peer]
    if missing:
        if here:
            result *= (ranks - 1) / here
            result += own
        else:
            result[:] = own * ranks
    return missing
