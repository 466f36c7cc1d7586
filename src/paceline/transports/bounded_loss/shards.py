"""Which bytes of a vector are which rank's shard and which chunk."""

from __future__ import annotations

from typing import Any

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
