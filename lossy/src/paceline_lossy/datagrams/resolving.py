"""Decides the fate of the datagrams that an endpoint sent, and whether their chunks are sent again. Compiled.

Rules
1. A peer's FEEDBACK names the datagrams that arrived, its NACK the missing chunks. Without either, a timeout counts
   them as lost.
2. A lost chunk is let go while the bound allows one more. Otherwise it is sent again.
3. A datagram that FEEDBACK counted as lost may only be late. If it arrives, the path reorders more than assumed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline_lossy.datagrams import congestion_window as window
from paceline_lossy.datagrams import datagram as d
from paceline_lossy.datagrams import endpoint_state as e
from paceline_lossy.datagrams.machine_code import inner

_LONGEST_RTT_US = 60_000_000
_MOST_REORDER = 512


@inner
def take_feedback(t: Any, peer: int, way: int, row: Any, word: Any, size: int, now_us: int) -> None:
    """Note which datagrams have arrived, and queue the lost ones."""
    w, rate = t.ways[way], t.rates[way]
    largest = d.widened(np.int64(word[d.CHUNK]), w[e.W_NEXT])
    if largest >= w[e.W_NEXT] or largest < w[e.W_UNRESOLVED] - 1:
        return  # it is older than the last one
    bits, most = (size - d.HEADER_BYTES) * 8, d.most_bits(t.numbers[e.PAYLOAD])
    progress, fates = 0, t.fates[way]
    for number in range(w[e.W_UNRESOLVED], largest + 1):
        if fates[number % e.RING] != e.IN_FLIGHT:
            continue
        back = largest - number
        is_told = back > 0 and back <= bits
        if (not is_told and back <= most) or (
            is_told and (row[d.HEADER_BYTES + (back - 1) // 8] >> ((back - 1) % 8)) & 1
        ):
            fates[number % e.RING] = e.ARRIVED
            w[e.W_FLYING] -= 1
            w[e.W_ROUND_GOOD] += 1
            progress += 1
            _confirm(t, peer, t.ring[way, number % e.RING])
        elif back >= w[e.W_REORDER]:
            give_up(t, peer, way, number)
            w[e.W_ROUND_LOST] += 1
    # A datagram that was given up too early shows that the path reorders more than assumed.
    for back in range(1, min(bits, largest) + 1):
        place = (largest - back) % e.RING
        if fates[place] != e.MISSING or t.ring[way, place, e.G_NUMBER] != largest - back:
            continue
        if (row[d.HEADER_BYTES + (back - 1) // 8] >> ((back - 1) % 8)) & 1:
            fates[place] = e.ARRIVED
            w[e.W_REORDER] = min(_MOST_REORDER, max(w[e.W_REORDER], 2 * back))
            _confirm(t, peer, t.ring[way, place])
    while w[e.W_UNRESOLVED] < w[e.W_NEXT] and fates[w[e.W_UNRESOLVED] % e.RING] != e.IN_FLIGHT:
        w[e.W_UNRESOLVED] += 1
    marked = d.widened(np.int64(word[d.AUX]), w[e.W_MARKS_SEEN])
    if marked > w[e.W_MARKS_SEEN]:
        w[e.W_ROUND_MARKED] += marked - w[e.W_MARKS_SEEN]
        t.numbers[e.MARKED] += marked - w[e.W_MARKS_SEEN]
        w[e.W_MARKS_SEEN] = marked
    if progress:
        w[e.W_PROGRESS_AT] = now_us
        w[e.W_BACKOFF] = 0
        rtt = (now_us - np.int64(word[d.TIME])) & 0xFFFFFFFF
        if 0 < rtt < _LONGEST_RTT_US:
            window.note_round_trip(w, rate, float(rtt), np.int64(word[d.NUMBER]), now_us)
        if largest >= w[e.W_ROUND_END]:
            window.end_round(w, rate, now_us)


@inner
def _confirm(t: Any, peer: int, sent: Any) -> None:
    """Note that a chunk has arrived, in any of its repetitions."""
    if sent[e.G_CHUNK] < 0:
        return
    slot = sent[e.G_COLLECTIVE] % e.SLOTS
    phase, chunk = sent[e.G_CHUNK] >> 32, sent[e.G_CHUNK] & 0xFFFFFFFF
    outgoing = t.outgoing[slot, phase, peer]
    if outgoing[e.O_NUMBER] != sent[e.G_COLLECTIVE]:
        return
    state = t.chunk_state[slot, phase, peer, chunk]
    if state == e.QUEUED:
        outgoing[e.O_QUEUED] -= 1
    elif state == e.FORGIVEN:
        outgoing[e.O_FORGIVEN] -= 1
    t.chunk_state[slot, phase, peer, chunk] = e.DELIVERED


@inner
def give_up(t: Any, peer: int, way: int, number: int) -> None:
    """Count a datagram as lost: repeat its chunk, or let it go within the bound."""
    sent = t.ring[way, number % e.RING]
    t.fates[way, number % e.RING] = e.MISSING
    t.ways[way, e.W_FLYING] -= 1
    slot = sent[e.G_COLLECTIVE] % e.SLOTS
    place_of = sent[e.G_CHUNK] if sent[e.G_CHUNK] >= 0 else -sent[e.G_CHUNK] - 1
    phase, chunk = place_of >> 32, place_of & 0xFFFFFFFF
    outgoing = t.outgoing[slot, phase, peer]
    if outgoing[e.O_NUMBER] != sent[e.G_COLLECTIVE] or not outgoing[e.O_ACTIVE]:
        return
    outgoing[e.O_HAS_LOST] = 1
    if sent[e.G_CHUNK] < 0:
        end_again(outgoing)
    elif (
        t.chunk_state[slot, phase, peer, chunk] == e.FLYING
        and t.chunk_order[slot, phase, peer, chunk] == sent[e.G_ORDER]
    ):
        let_go_or_queue(t, slot, phase, peer, chunk)


@inner
def let_go_or_queue(t: Any, slot: int, phase: int, peer: int, chunk: int) -> None:
    """Forgive the loss of a chunk if the bound allows one more. Otherwise queue it to be sent again."""
    outgoing = t.outgoing[slot, phase, peer]
    outgoing[e.O_HAS_LOST], outgoing[e.O_TRIES] = 1, 0
    is_protected = phase == 0 and t.chunk_class[slot, peer, chunk] == 1
    if not is_protected and outgoing[e.O_FORGIVEN] < outgoing[e.O_ALLOWED]:
        t.chunk_state[slot, phase, peer, chunk] = e.FORGIVEN
        outgoing[e.O_FORGIVEN] += 1
    else:
        queue(t, slot, phase, peer, chunk)


@inner
def queue(t: Any, slot: int, phase: int, peer: int, chunk: int) -> None:
    """Queue a chunk to be sent again."""
    outgoing = t.outgoing[slot, phase, peer]
    t.chunk_state[slot, phase, peer, chunk] = e.QUEUED
    outgoing[e.O_QUEUED] += 1
    end_again(outgoing)


@inner
def end_again(outgoing: Any) -> None:
    """Send END once more, after the queued chunks."""
    outgoing[e.O_END_AT] = outgoing[e.O_ENDED] = 0


@inner
def take_nack(t: Any, slot: int, phase: int, peer: int, row: Any, word: Any, size: int) -> None:
    """Note which chunks the receiver misses. A NACK concerns only chunks sent before the END that it answers."""
    outgoing = t.outgoing[slot, phase, peer]
    first, chunks = np.int64(word[d.CHUNK]), outgoing[e.O_CHUNKS]
    if not outgoing[e.O_ACTIVE] or np.int64(word[d.CHUNKS]) != outgoing[e.O_CHUNKS]:
        return
    end_order = d.widened(np.int64(word[d.AUX]), t.peers[peer, e.P_ORDER])
    for chunk in range(first, min(chunks, first + (size - d.HEADER_BYTES) * 8)):
        if t.chunk_order[slot, phase, peer, chunk] > end_order:
            continue
        state = t.chunk_state[slot, phase, peer, chunk]
        back = chunk - first
        if (row[d.HEADER_BYTES + back // 8] >> (back % 8)) & 1:
            if state in (e.FLYING, e.DELIVERED):
                let_go_or_queue(t, slot, phase, peer, chunk)
        elif state not in (e.DELIVERED, e.UNSENT):
            if state == e.QUEUED:
                outgoing[e.O_QUEUED] -= 1
            elif state == e.FORGIVEN:
                outgoing[e.O_FORGIVEN] -= 1
            t.chunk_state[slot, phase, peer, chunk] = e.DELIVERED
    end_again(outgoing)
