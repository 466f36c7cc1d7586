"""The wire format: a header of 40 bytes, little endian, and up to one chunk of a gradient.

```text
 0  8  code: SipHash-2-4 of the rest of the header and of the payload's NH (`nh`), by the keys of this
       direction between these two ranks
 8  4  collective: its number on this connection, or of a message its number among those of this direction; in
       FEEDBACK its own number
12  4  number: of a DATA or END among all from this rank's port to that rank, of a NACK, DONE, STATUS or FEEDBACK among
       all of these to that rank; never used again; in FEEDBACK how long the received one whose time is echoed was on
       its way, by the two ranks' clocks
16  4  time: microseconds on the sender's clock, about when it leaves the host; in FEEDBACK the echo of a received one
20  4  begun: how many collectives the sender has begun, or messages it has begun to receive from this peer
24  4  chunk: of the transfer; in FEEDBACK the largest number received; in NACK the first chunk of the bitmap
28  4  chunks: how many the transfer has, of a message in parts the tag of this part; in FEEDBACK how many datagrams
       were received
32  2  sender
34  1  kind, and in the upper half the port, of the sender's that it left by; in FEEDBACK the receiver's, of whose
       datagrams it tells
35  1  flags
36  4  aux: in DATA and END of phase 0 how many chunks are protected; in FEEDBACK how many datagrams carried a
          congestion mark; in NACK that END's number among all to this rank
40     payload: a chunk, or a bitmap; of an END its number among all to this rank, by which ports there is one,
       and microseconds until the next one, unless there is an answer
```

A FEEDBACK's bitmap says of the numbers below the largest, backwards, which have arrived. It is as short as it can be:
what it does not reach has arrived, up to `most_bits` back; what is further back is lost.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline_lossy.datagrams import authentication as auth
from paceline_lossy.datagrams import endpoint_state as e
from paceline_lossy.datagrams.machine_code import compiled, inner

HEADER_BYTES = 40
MOST_PAYLOAD_BYTES = 8928

DATA, END, FEEDBACK, NACK, DONE, STATUS = 1, 2, 3, 4, 5, 6
"""A chunk; every chunk was sent; which arrived; which are missing; enough arrived; a sign of life."""

GATHER, PROTECTED, ASK, DROPPABLE, UNHEARD = 1, 2, 4, 64, 128
"""Flags: phase 1; the chunk must not be lost; answer this; switches may drop this first; no answer has come by any port
for a long time."""

CLASS_SHIFT = 3
"""Three bits of the flags, from this one on, are the class selector, which the IP header carries, too."""

MOST_PORTS = 16

END_BYTES = HEADER_BYTES + 12
END_ORDER, END_PORTS, END_PAUSE = (HEADER_BYTES // 4 + field for field in range(3))
"""The payload of an END, as indices into 32-bit words."""

_ECN_CAPABLE = 2

COLLECTIVE, NUMBER, TIME, BEGUN, CHUNK, CHUNKS, SENDER_KIND, AUX = 2, 3, 4, 5, 6, 7, 8, 9
"""Fields, as indices into the header's 32-bit words."""


def payload_room(mtu: int) -> int:
    """Return the gradient bytes in one datagram that fits an IP packet of `mtu` bytes; a multiple of 8."""
    return min((mtu - 28 - HEADER_BYTES) // 8 * 8, MOST_PAYLOAD_BYTES)


@inner
def most_bits(payload: int) -> int:
    """Return the length of a FEEDBACK's longest bitmap."""
    return min(e.FEEDBACK_BITS, payload // 4 * 32)


@compiled
def write_header(
    words: Any,
    kind: int,
    port: int,
    flags: int,
    sender: int,
    collective: int,
    number: int,
    now_us: int,
    begun: int,
    chunk: int,
    chunks: int,
    aux: int,
) -> None:
    """Write a header without its code into `words`, shape (N,), uint32."""
    words[COLLECTIVE] = collective & 0xFFFFFFFF
    words[NUMBER] = number & 0xFFFFFFFF
    words[TIME] = now_us & 0xFFFFFFFF
    words[BEGUN] = begun & 0xFFFFFFFF
    words[CHUNK] = chunk
    words[CHUNKS] = chunks & 0xFFFFFFFF
    words[SENDER_KIND] = sender | (kind << 16) | (port << 20) | (flags << 24)
    words[AUX] = aux & 0xFFFFFFFF


@inner
def seal(row: Any, word: Any, size: int, keys: Any, hash_key: Any) -> None:
    """Write the code of a datagram of `size` bytes. `row` and `word` are its memory as uint64 and as uint32."""
    row[0] = _code(row, word, size, keys, hash_key)


@inner
def is_sealed(row: Any, word: Any, size: int, keys: Any, hash_key: Any) -> bool:
    """Return whether a datagram of `size` bytes carries the right code."""
    return bool(row[0] == _code(row, word, size, keys, hash_key))


@inner
def _code(row: Any, word: Any, size: int, keys: Any, hash_key: Any) -> Any:
    """Return the code of a datagram. Headers never repeat, so one hash never gives the same code twice."""
    one, two = auth.nh(word, HEADER_BYTES // 4, size - HEADER_BYTES, hash_key)
    v0, v1, v2, v3 = auth.start(keys[0], keys[1])
    for i in range(1, HEADER_BYTES // 8):
        v0, v1, v2, v3 = auth.absorb(v0, v1, v2, v3, row[i])
    v0, v1, v2, v3 = auth.absorb(v0, v1, v2, v3, one)
    v0, v1, v2, v3 = auth.absorb(v0, v1, v2, v3, two)
    return auth.finish(v0, v1, v2, v3, np.uint64(size))


@compiled
def widened(low: int, near: int) -> int:
    """Return the number nearest to `near` whose lowest 32 bits are `low`."""
    difference = (low - near) & 0xFFFFFFFF
    if difference >= 0x80000000:
        difference -= 0x100000000
    return near + difference


@compiled
def tos_of(words: Any) -> int:
    """Return a datagram's type of service: its class selector, and the ECN-capable bit unless it may be dropped.

    Source:
        Wang et al. 2020 (DLCP), section 4: switches that mark one kind above a threshold drop the other there.
    """
    flags = np.int64(words[SENDER_KIND]) >> 24
    return int((flags >> CLASS_SHIFT & 7) << 5 | (0 if flags & DROPPABLE else _ECN_CAPABLE))


def words_of(rows: Any) -> tuple[Any, Any]:
    """Return views of datagrams' memory, shape (N, bytes), as 32-bit and as 64-bit words."""
    return rows.view(np.uint32), rows.view(np.uint64)
