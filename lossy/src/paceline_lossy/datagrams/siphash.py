"""SipHash-2-4, a 64-bit message authentication code that is fast on short messages; compiled.

`begun`, then `taken` for each word of 64 bits, then `ended`, the state being four words.

Source:
    Aumasson & Bernstein 2012, "SipHash: a fast short-input PRF", section 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline_lossy.datagrams.machine_code import compiled, inner

U64 = np.uint64


@inner
def _rotate(x: Any, by: int) -> Any:
    return (x << U64(by)) | (x >> U64(64 - by))


@inner
def _round(v0: Any, v1: Any, v2: Any, v3: Any) -> Any:
    v0 += v1
    v2 += v3
    v1 = _rotate(v1, 13) ^ v0
    v3 = _rotate(v3, 16) ^ v2
    v0 = _rotate(v0, 32)
    v2 += v1
    v0 += v3
    v1 = _rotate(v1, 17) ^ v2
    v3 = _rotate(v3, 21) ^ v0
    v2 = _rotate(v2, 32)
    return v0, v1, v2, v3


@inner
def begun(k0: Any, k1: Any) -> Any:
    """The state before the first word, by the key's two halves."""
    return (
        k0 ^ U64(0x736F6D6570736575),
        k1 ^ U64(0x646F72616E646F6D),
        k0 ^ U64(0x6C7967656E657261),
        k1 ^ U64(0x7465646279746573),
    )


@inner
def taken(v0: Any, v1: Any, v2: Any, v3: Any, word: Any) -> Any:
    """The state after one more word."""
    v0, v1, v2, v3 = _round(v0, v1, v2, v3 ^ word)
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return v0 ^ word, v1, v2, v3


@inner
def ended(v0: Any, v1: Any, v2: Any, v3: Any, last: Any) -> Any:
    """The code; `last` holds the remaining bytes, and in its highest byte the message's length, modulo 256."""
    v0, v1, v2, v3 = taken(v0, v1, v2, v3, last)
    v2 ^= U64(0xFF)
    for _ in range(4):
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return v0 ^ v1 ^ v2 ^ v3


@compiled
def siphash(words: Any, first: int, num_bytes: int, k0: Any, k1: Any) -> Any:
    """Return the code of `num_bytes` bytes that begin at word `first`, by the two halves of a key.

    Words are uint64, little endian; what follows the message in its last word does not matter.
    """
    v0, v1, v2, v3 = begun(k0, k1)
    num_words = num_bytes // 8
    for i in range(first, first + num_words):
        v0, v1, v2, v3 = taken(v0, v1, v2, v3, words[i])
    last = U64(num_bytes & 0xFF) << U64(56)
    rest = num_bytes % 8
    if rest:
        last |= words[first + num_words] & ((U64(1) << U64(8 * rest)) - U64(1))
    return ended(v0, v1, v2, v3, last)
