"""The message authentication code of a datagram: SipHash of a short hash (NH) of its payload. Compiled.

SipHash-2-4 is a 64-bit code that is fast on short messages. Call `start`, then `absorb` for each word of 64 bits, then
`finish`. The state is four words.

NH is a hash by a secret key. It is equal for two different messages with a chance of 2^-64, however they were chosen.
It is no code by itself, so no peer sees its result, only SipHash of it (`datagram.seal`). It needs a tenth of
SipHash's time for long messages, with one product for two words.

Source:
    Aumasson & Bernstein 2012, "SipHash: a fast short-input PRF", section 2.
    Black, Halevi, Krawczyk, Krovetz & Rogaway 1999, "UMAC: fast and secure message authentication": NH, twice with the
    key moved on by a pair (the Toeplitz construction), each with a chance of 2^-32; RFC 4418, section 5.2.2. There
    neighbours are pairs. Here a pair is one word of the first half and one of the second, so that they are read in
    order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline_lossy.datagrams.machine_code import compiled, inner

U32, U64 = np.uint32, np.uint64


def num_pairs(payload_bytes: int) -> int:
    """Return the number of word pairs in a key: one more than a message of `payload_bytes` bytes has."""
    return (payload_bytes + 7) // 8 + 1


@compiled
def nh(words: Any, first: int, num_bytes: int, key: Any) -> Any:
    """Return two numbers of 64 bits for `num_bytes` bytes from word `first` on. It does not distinguish lengths.

    Words are uint32, little endian, filled up with zeros to an even number. `key` is random, shape (2, pairs), of at
    least `num_pairs(num_bytes)` pairs.
    """
    num_words = (num_bytes + 3) // 4
    if num_bytes % 4:
        words[first + num_words - 1] &= (U32(1) << U32(8 * (num_bytes % 4))) - U32(1)
    if num_words % 2:
        words[first + num_words] = 0
    pairs = (num_words + 1) // 2
    left, right = words[first : first + pairs], words[first + pairs : first + 2 * pairs]
    by_left, by_right = key[0], key[1]
    one, two = U64(0), U64(0)
    for i in range(pairs):
        one += U64(U32(left[i] + by_left[i])) * U64(U32(right[i] + by_right[i]))
        two += U64(U32(left[i] + by_left[i + 1])) * U64(U32(right[i] + by_right[i + 1]))
    return one, two


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
def start(k0: Any, k1: Any) -> Any:
    """Return the state before the first word, from the key's two halves."""
    return (
        k0 ^ U64(0x736F6D6570736575),
        k1 ^ U64(0x646F72616E646F6D),
        k0 ^ U64(0x6C7967656E657261),
        k1 ^ U64(0x7465646279746573),
    )


@inner
def absorb(v0: Any, v1: Any, v2: Any, v3: Any, word: Any) -> Any:
    """Return the state after one more word."""
    v0, v1, v2, v3 = _round(v0, v1, v2, v3 ^ word)
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return v0 ^ word, v1, v2, v3


@inner
def finish(v0: Any, v1: Any, v2: Any, v3: Any, last: Any) -> Any:
    """Return the code. `last` holds the remaining bytes, and in its highest byte the message's length, modulo 256."""
    v0, v1, v2, v3 = absorb(v0, v1, v2, v3, last)
    v2 ^= U64(0xFF)
    for _ in range(4):
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return v0 ^ v1 ^ v2 ^ v3


@compiled
def siphash(words: Any, first: int, num_bytes: int, k0: Any, k1: Any) -> Any:
    """Return the code of `num_bytes` bytes that begin at word `first`, by the two halves of a key.

    Words are uint64, little endian. Bytes behind the message in its last word do not matter.
    """
    v0, v1, v2, v3 = start(k0, k1)
    num_words = num_bytes // 8
    for i in range(first, first + num_words):
        v0, v1, v2, v3 = absorb(v0, v1, v2, v3, words[i])
    last = U64(num_bytes & 0xFF) << U64(56)
    rest = num_bytes % 8
    if rest:
        last |= words[first + num_words] & ((U64(1) << U64(8 * rest)) - U64(1))
    return finish(v0, v1, v2, v3, last)
