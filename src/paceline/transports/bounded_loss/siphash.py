"""SipHash-2-4, a 64-bit message authentication code that is fast on short messages; compiled.

Source:
    Aumasson & Bernstein 2012, "SipHash: a fast short-input PRF", section 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.transports.bounded_loss.machine_code import compiled, inner

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


@compiled
def siphash(words: Any, first: int, num_bytes: int, k0: Any, k1: Any) -> Any:
    """Return the code of `num_bytes` bytes that begin at word `first`.

    Args:
        words: Shape (N,), uint64, little endian; what follows the message in its last word does not matter.
        first: Where the message begins, in words.
        num_bytes: Its length.
        k0: The key's first half.
        k1: The key's second half.
    """
    v0 = k0 ^ U64(0x736F6D6570736575)
    v1 = k1 ^ U64(0x646F72616E646F6D)
    v2 = k0 ^ U64(0x6C7967656E657261)
    v3 = k1 ^ U64(0x7465646279746573)
    num_words = num_bytes // 8
    for i in range(first, first + num_words):
        m = words[i]
        v3 ^= m
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
        v0 ^= m
    last = U64(num_bytes & 0xFF) << U64(56)
    rest = num_bytes % 8
    if rest:
        last |= words[first + num_words] & ((U64(1) << U64(8 * rest)) - U64(1))
    v3 ^= last
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    v0 ^= last
    v2 ^= U64(0xFF)
    for _ in range(4):
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return v0 ^ v1 ^ v2 ^ v3
