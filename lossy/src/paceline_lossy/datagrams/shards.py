"""The layout of a vector: the bytes of each shard and each chunk."""

from __future__ import annotations

from typing import Any

from paceline_lossy.datagrams import endpoint_state as e
from paceline_lossy.datagrams.machine_code import compiled

_MASK = 2**64 - 1


@compiled
def num_chunks(num_bytes: int, payload: int) -> int:
    """Return the number of datagrams for `num_bytes` bytes."""
    return (num_bytes + payload - 1) // payload


@compiled
def chunk_bytes(num_bytes: int, tail_bytes: int, payload: int, chunk: int) -> int:
    """Return the length of a chunk of a transfer of `num_bytes` bytes and a tail. The tail begins a new chunk."""
    before = num_chunks(num_bytes, payload)
    if chunk < before:
        return int(min(payload, num_bytes - chunk * payload))
    return int(min(payload, tail_bytes - (chunk - before) * payload))


def shard_bytes(slot: Any, rank: int) -> int:
    """Return the length of a rank's shard. The last shards may be shorter, or empty."""
    return int(max(0, min(slot[e.S_SHARD], slot[e.S_BYTES] - rank * slot[e.S_SHARD])))


def mask_bytes(slot: Any, owner: int, ranks: int, payload: int) -> int:
    """Return the length of the mask behind a reduced shard: one bit per rank and chunk, whole bytes per rank."""
    if slot[e.S_BOUND_PPM] == 0:
        return 0
    return int(ranks * ((num_chunks(shard_bytes(slot, owner), payload) + 7) // 8))


def transfer_chunks(slot: Any, phase: int, owner: int, ranks: int, payload: int) -> int:
    """Return the number of datagrams of a transfer of `owner`'s shard. In phase 1 the mask follows in new chunks."""
    chunks = num_chunks(shard_bytes(slot, owner), payload)
    if phase == 1:
        chunks += num_chunks(mask_bytes(slot, owner, ranks, payload), payload)
    return int(chunks)


def first_chunk(collective: int, sender: int, receiver: int, chunks: int) -> int:
    """Return the chunk that a transfer begins with. It is pseudorandom, so that losses at the end hit different parts.

    An arithmetic progression would repeat in every step, for some number of collectives per step.

    Source:
        Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators", figure 16: the mixing of bits.
    """
    mixed = (collective << 32 ^ sender << 16 ^ receiver) * 0x9E3779B97F4A7C15 & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return (mixed ^ mixed >> 31) % chunks
