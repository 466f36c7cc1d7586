"""Writes an endpoint's answers to its peers: acknowledgements, requests for chunks, keep-alives. Compiled.

Rules
1. FEEDBACK on the datagrams of a peer's port leaves by the port of the same number here, unless that one is silent.
2. Replies that a peer waits for rotate over the ports. One port may be blocked, and the peer will ask again.
3. A peer that says that it hears nothing is answered by the next port, and from then on by that one. The ports that
   its datagrams use may be open in one direction only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline_lossy.datagrams import datagram as d
from paceline_lossy.datagrams import endpoint_state as e
from paceline_lossy.datagrams.machine_code import inner

_FEEDBACK_DELAY_US = 2000  # with 4000, pushes of many ranks into one port took a seventh longer
_ASK_EVERY_US = 200_000


@inner
def heard_ports(t: Any, peer: int) -> int:
    """Return the ports whose ways to a peer are not silent, one bit each; if all are, those with fewest timeouts."""
    ports = t.numbers[e.PORTS]
    found = 0
    fewest = t.ways[peer * ports, e.W_BACKOFF]
    for port in range(ports):
        timeouts = t.ways[peer * ports + port, e.W_BACKOFF]
        if timeouts < fewest:
            fewest, found = timeouts, 0
        found |= np.int64(timeouts == fewest) << port
    return found


@inner
def _next_number(p: Any) -> int:
    """Return the number of the next reply to a peer, by which the peer recognizes a replay."""
    p[e.P_SAID] += 1
    return int(p[e.P_SAID])


@inner
def _way_to(t: Any, peer: int, port: int) -> int:
    """Return the way by this port, or by the next port that is not silent."""
    ports, heard = t.numbers[e.PORTS], heard_ports(t, peer)
    while not heard >> port & 1:
        port = (port + 1) % ports
    return int(peer * ports + port)


@inner
def reply(t: Any, peer: int, words: Any, sizes: Any, ways: Any, count: int, now_us: int) -> int:
    """Write the replies to a peer: FEEDBACK, DONE, NACK, STATUS. Return the new count."""
    n, p = t.numbers, t.peers[peer]
    rank, begun = n[e.RANK], p[e.P_RECEIVING]
    for port in range(n[e.PORTS]):
        w = t.ways[peer * n[e.PORTS] + port]
        if w[e.W_RX_UNTOLD] > 0 and now_us - w[e.W_RX_FIRST_UNTOLD_AT] >= _FEEDBACK_DELAY_US:
            w[e.W_TELL_NOW] = 1
        if w[e.W_TELL_NOW] and w[e.W_RX_LARGEST] >= 0:
            count = _write_feedback(t, peer, port, words, sizes, ways, count, now_us)
    by = p[e.P_ANSWERS_BY] - 1
    way = _way_to(t, peer, by if by >= 0 else n[e.TURN] % n[e.PORTS])
    for slot in range(e.SLOTS):
        for phase in range(2):
            incoming = t.incoming[slot, phase, peer]
            reply = incoming[e.I_REPLY]
            if incoming[e.I_NUMBER] < 0 or reply == e.NO_REPLY or count >= sizes.shape[0]:
                continue
            incoming[e.I_REPLY] = e.NO_REPLY
            if reply == e.REPLY_DONE:
                d.write_header(
                    words[count],
                    d.DONE,
                    0,
                    phase | n[e.REPLY_FLAGS],
                    rank,
                    incoming[e.I_NUMBER],
                    _next_number(p),
                    now_us,
                    begun,
                    0,
                    incoming[e.I_CHUNKS],
                    0,
                )
                sizes[count], ways[count] = d.HEADER_BYTES, way
                count += 1
            else:
                count = _write_nacks(t, slot, phase, way, words, sizes, ways, count, now_us)
    for entry in range(p[e.P_LATE]):
        if count < sizes.shape[0]:
            collective, phase = t.late[peer, entry, 0], t.late[peer, entry, 1]
            flags = phase | n[e.REPLY_FLAGS]
            number = _next_number(p)
            d.write_header(words[count], d.DONE, 0, flags, rank, collective, number, now_us, begun, 0, 0, 0)
            sizes[count], ways[count] = d.HEADER_BYTES, way
            count += 1
    p[e.P_LATE] = 0
    is_quiet = now_us - max(p[e.P_HEARD_AT], p[e.P_ASKED_AT]) > _ASK_EVERY_US
    if (p[e.P_ANSWER] or is_quiet) and count < sizes.shape[0]:
        flags = n[e.REPLY_FLAGS] | (d.ASK if is_quiet else 0)
        d.write_header(words[count], d.STATUS, 0, flags, rank, 0, _next_number(p), now_us, begun, 0, 0, 0)
        sizes[count], ways[count] = d.HEADER_BYTES, way
        count += 1
        p[e.P_ANSWER] = 0
        if is_quiet:
            p[e.P_ASKED_AT] = now_us
    return count


@inner
def _write_feedback(
    t: Any, peer: int, port: int, words: Any, sizes: Any, ways: Any, count: int, now_us: int
) -> int:
    n, way = t.numbers, peer * t.numbers[e.PORTS] + port
    w = t.ways[way]
    largest = w[e.W_RX_LARGEST]
    word = words[count]
    first = d.HEADER_BYTES // 4
    furthest = min(d.most_bits(n[e.PAYLOAD]), largest)
    if largest - w[e.W_RX_GAP] > furthest:
        furthest = 0  # none of these was skipped
    while furthest > 0 and t.seen[way, (largest - furthest) % e.WINDOW]:
        furthest -= 1
    bits = max(1, (furthest + 31) // 32) * 32
    for i in range(first, first + bits // 32):
        word[i] = 0
    for back in range(1, min(bits, largest) + 1):
        if t.seen[way, (largest - back) % e.WINDOW]:
            word[first + (back - 1) // 32] |= np.uint32(1) << np.uint32((back - 1) % 32)
    echo = w[e.W_RX_TIME] + (now_us - w[e.W_RX_TIME_AT])
    leaving = t.peers[peer, e.P_ANSWERS_BY] - 1
    d.write_header(
        word,
        d.FEEDBACK,
        port,
        n[e.REPLY_FLAGS],
        n[e.RANK],
        _next_number(t.peers[peer]),
        w[e.W_RX_TIME_AT] - w[e.W_RX_TIME],
        echo,
        t.peers[peer, e.P_RECEIVING],
        largest & 0xFFFFFFFF,
        w[e.W_RX_COUNT],
        w[e.W_RX_MARKED],
    )
    sizes[count], ways[count] = (
        d.HEADER_BYTES + bits // 8,
        _way_to(t, peer, leaving if leaving >= 0 else port),
    )
    w[e.W_RX_UNTOLD] = w[e.W_TELL_NOW] = 0
    return count + 1


@inner
def _write_nacks(
    t: Any, slot: int, phase: int, way: int, words: Any, sizes: Any, ways: Any, count: int, now_us: int
) -> int:
    """List the missing chunks, in as many datagrams as needed. Datagrams of chunks that all arrived are sent, too."""
    n, peer = t.numbers, way // t.numbers[e.PORTS]
    incoming = t.incoming[slot, phase, peer]
    chunks = incoming[e.I_CHUNKS]
    bits = (n[e.PAYLOAD] // 4) * 32
    for first in range(0, chunks, bits):
        if count >= sizes.shape[0]:
            break  # its sender will send END again
        here = min(bits, chunks - first)
        word = words[count]
        begin = d.HEADER_BYTES // 4
        for i in range(begin, begin + (here + 31) // 32):
            word[i] = 0
        for i in range(here):
            if not t.have[slot, phase, peer, first + i]:
                word[begin + i // 32] |= np.uint32(1) << np.uint32(i % 32)
        d.write_header(
            word,
            d.NACK,
            0,
            phase | n[e.REPLY_FLAGS],
            n[e.RANK],
            incoming[e.I_NUMBER],
            _next_number(t.peers[peer]),
            now_us,
            t.peers[peer, e.P_RECEIVING],
            first,
            incoming[e.I_CHUNKS],
            incoming[e.I_END_ORDER],
        )
        sizes[count], ways[count] = d.HEADER_BYTES + (here + 31) // 32 * 4, way
        count += 1
    return count
