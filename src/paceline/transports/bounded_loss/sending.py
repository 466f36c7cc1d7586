"""What an endpoint sends, and when; compiled, many datagrams at a time.

Rules
1. Collectives go in their order, those of a higher priority first; of one, repetitions first, then chunks that were
   never sent, then an END, and soon another: nothing follows whose arrival would tell that the first was lost, and the
   answer may be lost as well.
2. The first chunk of a transfer differs from collective to collective, so that no part of a vector is always the last
   one, which losses hit more often.
3. Ranks are served in turn, by bursts of a few datagrams: a small switch buffer holds a burst from everybody.
4. A peer that has not begun a collective yet is sent no more of it than it keeps for later.
5. Whatever expects an answer is repeated, with growing pauses, until the answer comes or the peer is given up.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.transports.bounded_loss import congestion_window as window
from paceline.transports.bounded_loss import datagram as d
from paceline.transports.bounded_loss import endpoint_state as e
from paceline.transports.bounded_loss.machine_code import compiled, copy_memory
from paceline.transports.bounded_loss.receiving import give_up, judge
from paceline.transports.bounded_loss.shards import chunk_bytes

BURST = 8
_FEEDBACK_DELAY_US = 2000
_LEAST_TIMEOUT_US = 10_000
_FIRST_TIMEOUT_US = 40_000
_MOST_BACKOFF = 5
_MOST_TIMEOUTS = 12
_AGAIN_US = 1000
_ASK_EVERY_US = 200_000
_ENDED = -1
_NOTHING = -2


@compiled
def advance(t: Any, now_us: int) -> None:
    """Move every collective on: note which shards are complete and what is finished, free what nobody needs."""
    n = t.numbers
    rank, ranks = n[e.RANK], n[e.RANKS]
    has_ended = n[e.IS_CHANGED]
    n[e.IS_CHANGED] = 0
    for slot in range(e.SLOTS):
        s = t.slots[slot]
        if s[e.S_STAGE] == e.REDUCING and _all_done(t, slot, 0):
            s[e.S_STAGE] = e.ARRIVED_ALL
        if s[e.S_STAGE] == e.GATHERING and _all_done(t, slot, 1):
            s[e.S_STAGE] = e.FINISHED
        if s[e.S_STAGE] == e.RETIRED:
            waiting = 0
            for peer in range(ranks):
                if peer != rank:
                    waiting += t.outgoing[slot, 0, peer, e.O_ACTIVE] + t.outgoing[slot, 1, peer, e.O_ACTIVE]
            if waiting == 0:
                s[e.S_STAGE] = e.FREE
                s[e.S_COLLECTIVE] = -1
                for peer in range(ranks):
                    for phase in range(2):
                        t.outgoing[slot, phase, peer, e.O_NUMBER] = -1
                        t.incoming[slot, phase, peer, e.I_NUMBER] = -1
        if s[e.S_STAGE] == e.CARRYING and has_ended:
            s[e.S_STAGE] = e.CARRIED


@compiled
def _all_done(t: Any, slot: int, phase: int) -> bool:
    for peer in range(t.numbers[e.RANKS]):
        if peer != t.numbers[e.RANK] and not t.incoming[slot, phase, peer, e.I_DONE]:
            return False
    return True


@compiled
def transmit(t: Any, words: Any, longs: Any, sizes: Any, peers: Any, now_us: int, most: int) -> int:
    """Fill rows with the datagrams that should leave now; return how many.

    Args:
        t: The endpoint's `Tables`.
        words: Rows of memory, as 32-bit words, and the same as
        longs: 64-bit words.
        sizes: Out: bytes of each datagram.
        peers: Out: to whom each goes; those to one peer follow each other.
        now_us: The time.
        most: Of chunks; what answers peers goes in any case.
    """
    n = t.numbers
    ranks, rank = n[e.RANKS], n[e.RANK]
    room = sizes.shape[0]
    count = 0
    for peer in range(ranks):
        if peer != rank and room - count > 8 + e.LATE_REPLIES:
            _watch(t, peer, now_us)
            count = _reply(t, peer, words, sizes, peers, count, now_us)
    n[e.TURN] += 1
    for turn in range(ranks - 1):
        peer = (rank + 1 + (n[e.TURN] + turn) % (ranks - 1)) % ranks
        before = count
        count = _send_burst(t, peer, words, sizes, peers, count, now_us, most)
        most -= count - before
    for i in range(count):
        d.seal(longs[i], sizes[i], t.keys[peers[i], 0], t.keys[peers[i], 1])
    n[e.SENT] += count
    return count


@compiled
def _watch(t: Any, peer: int, now_us: int) -> None:
    """Do what is due by the clock: timeouts, grace, signs of life."""
    n, p, rate = t.numbers, t.peers[peer], t.rates[peer]
    timeout_us = _LEAST_TIMEOUT_US + 2 * np.int64(rate[e.R_RTT])
    if not p[e.P_HAS_WAY]:
        timeout_us = _FIRST_TIMEOUT_US  # no round trip is known yet
    if p[e.P_FLYING] > 0 and now_us - p[e.P_PROGRESS_AT] > timeout_us << min(p[e.P_BACKOFF], _MOST_BACKOFF):
        for number in range(p[e.P_UNRESOLVED], p[e.P_NEXT]):
            if t.ring[peer, number % e.RING, e.G_STATE] == e.IN_FLIGHT:
                give_up(t, peer, number)
        p[e.P_UNRESOLVED] = p[e.P_NEXT]
        p[e.P_PROGRESS_AT] = now_us
        if p[e.P_BACKOFF] == 0:
            p[e.P_STUCK_SINCE] = now_us
        p[e.P_BACKOFF] += 1
        is_stuck = p[e.P_BACKOFF] > _MOST_TIMEOUTS and now_us - p[e.P_STUCK_SINCE] > n[e.SILENCE_US]
        if is_stuck and now_us - p[e.P_HEARD_AT] < n[e.SILENCE_US] // 2:
            n[e.STUCK_PEER] = peer  # it speaks, and nothing that is longer than what it says reaches it
        window.note_silence(p, rate)
    is_needed = False
    for slot in range(e.SLOTS):
        if t.slots[slot, e.S_STAGE] == e.FREE:
            continue
        for phase in range(2):
            outgoing, incoming = t.outgoing[slot, phase, peer], t.incoming[slot, phase, peer]
            if outgoing[e.O_ACTIVE]:
                is_needed = True
                pause_us = timeout_us << min(outgoing[e.O_TRIES], _MOST_BACKOFF)
                if outgoing[e.O_END_AT] and now_us - outgoing[e.O_END_AT] > pause_us:
                    outgoing[e.O_END_AT] = 0
                    outgoing[e.O_TRIES] += 1
            if incoming[e.I_CHUNKS] and not incoming[e.I_DONE]:
                is_needed = True
                if incoming[e.I_END_AT]:
                    judge(t, slot, phase, peer, now_us)
    if not (is_needed and p[e.P_IS_NEEDED]):
        p[e.P_HEARD_AT] = now_us  # its silence counts from when this rank first looked for it
    elif now_us - p[e.P_HEARD_AT] > n[e.SILENCE_US]:
        n[e.LOST_PEER] = peer
    p[e.P_IS_NEEDED] = 1 if is_needed else 0


@compiled
def _reply(t: Any, peer: int, words: Any, sizes: Any, peers: Any, count: int, now_us: int) -> int:
    """Write what answers a peer: FEEDBACK, DONE, NACK, STATUS. Returns the new count."""
    n, p = t.numbers, t.peers[peer]
    rank, begun = n[e.RANK], p[e.P_RECEIVING]
    if p[e.P_RX_UNTOLD] > 0 and now_us - p[e.P_RX_FIRST_UNTOLD_AT] >= _FEEDBACK_DELAY_US:
        p[e.P_TELL_NOW] = 1
    if p[e.P_TELL_NOW] and p[e.P_RX_LARGEST] >= 0:
        count = _write_feedback(t, peer, words, sizes, peers, count, now_us)
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
                    phase | n[e.REPLY_FLAGS],
                    rank,
                    incoming[e.I_NUMBER],
                    0,
                    now_us,
                    begun,
                    0,
                    incoming[e.I_CHUNKS],
                    0,
                )
                sizes[count], peers[count] = d.HEADER_BYTES, peer
                count += 1
            else:
                count = _write_nacks(t, slot, phase, peer, words, sizes, peers, count, now_us)
    for entry in range(p[e.P_LATE]):
        if count < sizes.shape[0]:
            collective, phase = t.late[peer, entry, 0], t.late[peer, entry, 1]
            flags = phase | n[e.REPLY_FLAGS]
            d.write_header(words[count], d.DONE, flags, rank, collective, 0, now_us, begun, 0, 0, 0)
            sizes[count], peers[count] = d.HEADER_BYTES, peer
            count += 1
    p[e.P_LATE] = 0
    is_quiet = now_us - max(p[e.P_HEARD_AT], p[e.P_ASKED_AT]) > _ASK_EVERY_US
    if (p[e.P_ANSWER] or is_quiet) and count < sizes.shape[0]:
        flags = n[e.REPLY_FLAGS] | (d.ASK if is_quiet else 0)
        d.write_header(words[count], d.STATUS, flags, rank, 0, 0, now_us, begun, 0, 0, 0)
        sizes[count], peers[count] = d.HEADER_BYTES, peer
        count += 1
        p[e.P_ANSWER] = 0
        if is_quiet:
            p[e.P_ASKED_AT] = now_us
    return count


@compiled
def _write_feedback(t: Any, peer: int, words: Any, sizes: Any, peers: Any, count: int, now_us: int) -> int:
    n, p = t.numbers, t.peers[peer]
    largest = p[e.P_RX_LARGEST]
    word = words[count]
    first = d.HEADER_BYTES // 4
    furthest = 0
    for back in range(1, min(d.most_bits(n[e.PAYLOAD]), largest) + 1):
        if not t.seen[peer, (largest - back) % e.WINDOW]:
            furthest = back
    bits = max(1, (furthest + 31) // 32) * 32
    for i in range(first, first + bits // 32):
        word[i] = 0
    for back in range(1, min(bits, largest) + 1):
        if t.seen[peer, (largest - back) % e.WINDOW]:
            word[first + (back - 1) // 32] |= np.uint32(1) << np.uint32((back - 1) % 32)
    echo = p[e.P_RX_TIME] + (now_us - p[e.P_RX_TIME_AT])
    d.write_header(
        word,
        d.FEEDBACK,
        n[e.REPLY_FLAGS],
        n[e.RANK],
        0,
        p[e.P_RX_TIME_AT] - p[e.P_RX_TIME],
        echo,
        p[e.P_RECEIVING],
        largest & 0xFFFFFFFF,
        p[e.P_RX_COUNT],
        p[e.P_RX_MARKED],
    )
    sizes[count], peers[count] = d.HEADER_BYTES + bits // 8, peer
    p[e.P_RX_UNTOLD] = p[e.P_TELL_NOW] = 0
    return count + 1


@compiled
def _write_nacks(
    t: Any, slot: int, phase: int, peer: int, words: Any, sizes: Any, peers: Any, count: int, now_us: int
) -> int:
    """Say which chunks are missing, in as many datagrams as that takes; those that miss nothing go, too."""
    n, incoming = t.numbers, t.incoming[slot, phase, peer]
    chunks = incoming[e.I_CHUNKS]
    bits = (n[e.PAYLOAD] // 4) * 32
    for first in range(0, chunks, bits):
        if count >= sizes.shape[0]:
            break  # its sender will say END again
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
            phase | n[e.REPLY_FLAGS],
            n[e.RANK],
            incoming[e.I_NUMBER],
            0,
            now_us,
            t.peers[peer, e.P_RECEIVING],
            first,
            incoming[e.I_TAG],
            incoming[e.I_END_NUMBER],
        )
        sizes[count], peers[count] = d.HEADER_BYTES + (here + 31) // 32 * 4, peer
        count += 1
    return count


@compiled
def _send_burst(
    t: Any, peer: int, words: Any, sizes: Any, peers: Any, count: int, now_us: int, most: int
) -> int:
    """Write a few chunks for a peer, as its window and pace allow. Returns the new count."""
    p, rate = t.peers[peer], t.rates[peer]
    if now_us < rate[e.R_NEXT_AT]:
        return count
    budget = min(np.int64(rate[e.R_WINDOW]) - p[e.P_FLYING], 2 * BURST, most, sizes.shape[0] - count)
    budget = min(budget, e.RING - (p[e.P_NEXT] - p[e.P_UNRESOLVED]))
    sent = 0
    newest = p[e.P_SENDING]
    for place_of in range(e.SLOTS):
        collective = newest - e.SLOTS + t.order[place_of]
        if collective < 0:
            continue
        slot = collective % e.SLOTS
        for phase in range(2):
            outgoing = t.outgoing[slot, phase, peer]
            if outgoing[e.O_NUMBER] != collective or not outgoing[e.O_ACTIVE]:
                continue
            while sent < budget:
                if p[e.P_BEGUN] <= collective:
                    if p[e.P_EARLY] >= e.STASH:
                        break
                    p[e.P_EARLY] += 1
                chunk = _next_chunk(t, slot, phase, peer, now_us)
                if chunk == _NOTHING:
                    break
                _write_chunk(t, slot, phase, peer, chunk, words[count], sizes, peers, count, now_us)
                count += 1
                sent += 1
    if sent:
        pause_us = window.pause_us(p, rate)
        rate[e.R_NEXT_AT] = max(rate[e.R_NEXT_AT], now_us - BURST * pause_us) + sent * pause_us
    return count


@compiled
def _next_chunk(t: Any, slot: int, phase: int, peer: int, now_us: int) -> int:
    """Which chunk of a transfer goes next; -1 for an END, -2 for nothing."""
    outgoing = t.outgoing[slot, phase, peer]
    chunks = outgoing[e.O_CHUNKS]
    if outgoing[e.O_QUEUED] > 0:
        state = t.chunk_state[slot, phase, peer]
        cursor = outgoing[e.O_CURSOR]
        for _ in range(chunks):
            chunk = cursor
            cursor = cursor + 1 if cursor + 1 < chunks else 0
            if state[chunk] == e.QUEUED:
                outgoing[e.O_QUEUED] -= 1
                outgoing[e.O_CURSOR] = cursor
                t.numbers[e.REPEATED] += 1
                return int(chunk)
    if outgoing[e.O_NEXT] < chunks:
        outgoing[e.O_NEXT] += 1
        return int((outgoing[e.O_START] + outgoing[e.O_NEXT] - 1) % chunks)
    is_told = outgoing[e.O_END_AT] > 0
    is_due_again = outgoing[e.O_ENDS] == 1 and now_us - outgoing[e.O_END_AT] > _AGAIN_US
    return _ENDED if not is_told or is_due_again else _NOTHING


@compiled
def _write_chunk(
    t: Any,
    slot: int,
    phase: int,
    peer: int,
    chunk: int,
    word: Any,
    sizes: Any,
    peers: Any,
    at: int,
    now_us: int,
) -> None:
    """Write a DATA, or an END if `chunk` is -1, and remember its number."""
    n, p = t.numbers, t.peers[peer]
    outgoing = t.outgoing[slot, phase, peer]
    payload, collective = n[e.PAYLOAD], outgoing[e.O_NUMBER]
    number = p[e.P_NEXT]
    flags, kind, length = phase | outgoing[e.O_FLAGS], d.DATA, 0
    if chunk == _ENDED:
        kind = d.END
        flags &= ~d.DROPPABLE
        outgoing[e.O_ENDS] = 2 if outgoing[e.O_END_AT] else 1
        outgoing[e.O_END_AT] = outgoing[e.O_END_AT] or now_us
    else:
        length = chunk_bytes(outgoing[e.O_BYTES], outgoing[e.O_TAIL_BYTES], payload, chunk)
        copy_memory(word.ctypes.data + d.HEADER_BYTES, outgoing[e.O_ADDRESS] + chunk * payload, length)
        if phase == 0 and t.chunk_class[slot, peer, chunk]:
            flags |= d.PROTECTED
        if flags & d.PROTECTED or t.chunk_state[slot, phase, peer, chunk] != e.UNSENT:
            flags &= ~d.DROPPABLE  # also not what is repeated, for the bound is used up
        t.chunk_state[slot, phase, peer, chunk] = e.FLYING
        t.chunk_number[slot, phase, peer, chunk] = number
    d.write_header(
        word,
        kind,
        flags,
        n[e.RANK],
        collective,
        number,
        now_us,
        p[e.P_RECEIVING],
        max(chunk, 0),
        outgoing[e.O_TAG],
        outgoing[e.O_PROTECTED],
    )
    sizes[at], peers[at] = d.HEADER_BYTES + length, peer
    sent = t.ring[peer, number % e.RING]
    place_of = (phase << 32) | max(chunk, 0)
    sent[e.G_COLLECTIVE], sent[e.G_STATE], sent[e.G_NUMBER] = collective, e.IN_FLIGHT, number
    sent[e.G_CHUNK] = place_of if chunk >= 0 else -place_of - 1
    if p[e.P_FLYING] == 0:
        p[e.P_PROGRESS_AT] = now_us
    p[e.P_FLYING] += 1
    p[e.P_NEXT] = number + 1
