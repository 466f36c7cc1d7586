"""Chooses the datagrams that an endpoint sends, and when. Compiled; many datagrams at a time.

Rules
1. Collectives are served in their order, those of a higher priority first. Among equal priorities, contributions go
   before sums, because other ranks wait for contributions. Otherwise all would wait for the last collective's sums.
   Within a collective, repetitions go first, then chunks that were never sent, then an END, and soon another END. No
   later datagram would show that the first END was lost, and its answer may be lost as well. Where chunks were lost
   before, more ENDs follow, with doubling pauses. The few chunks that are repeated last are sent twice, because
   another loss would cost a round trip.
2. The first chunk of a transfer differs from collective to collective. Losses hit the last chunks more often, and so
   they do not always hit the same part of a vector.
3. Peers are served by bursts of a few datagrams, so that a small switch buffer holds a burst from every rank. The peer
   with the most chunks left goes first. A sum waits for its slowest pair, and the other pairs have nothing to send
   then.
4. A peer that has not begun a collective is sent no more of it than it keeps for later.
5. A datagram that expects an answer is repeated, with growing pauses, until the answer comes or the peer is given up.
6. Each port of this rank is a separate way to a peer, with its own numbers, window and pace. A chunk takes any way
   that has room, so each way carries what it can. The chunks of a silent way are also sent by another one, until the
   silent one is heard again. Every way that is not silent sends END behind its own chunks.
7. If all of several ways are silent, each may still reach the peer, and only the answers may be lost. Then datagrams
   say so, and the peer answers by other ports (`answering`, rule 3).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline_lossy.datagrams import congestion_window as window
from paceline_lossy.datagrams import datagram as d
from paceline_lossy.datagrams import endpoint_state as e
from paceline_lossy.datagrams.answering import heard_ports, reply
from paceline_lossy.datagrams.machine_code import compiled, copy_memory, inner
from paceline_lossy.datagrams.receiving import judge
from paceline_lossy.datagrams.resolving import end_again, give_up, queue
from paceline_lossy.datagrams.shards import chunk_bytes

BURST = 8
LONGEST_REST_US = 900  # between two turns of the loop that moves the datagrams (`datagram_loop`)
_LEAST_TIMEOUT_US = 10_000
_FIRST_TIMEOUT_US = 40_000
_MOST_BACKOFF = 5
_MOST_TIMEOUTS = 12
_UNHEARD_US = 200_000  # several timeouts; a path that works in both directions is not silent for so long
_AGAIN_US = 1000
_ENDED = -1
_NOTHING = -2


@compiled
def advance(t: Any, now_us: int) -> None:
    """Advance every collective: find complete shards and finished collectives, and free slots that no peer needs."""
    n = t.numbers
    rank, ranks = n[e.RANK], n[e.RANKS]
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


@inner
def _all_done(t: Any, slot: int, phase: int) -> bool:
    for peer in range(t.numbers[e.RANKS]):
        if peer != t.numbers[e.RANK] and not t.incoming[slot, phase, peer, e.I_DONE]:
            return False
    return True


@compiled
def transmit(t: Any, words: Any, longs: Any, sizes: Any, ways: Any, now_us: int, most: Any) -> int:
    """Fill rows with the datagrams that should leave now; return how many.

    Args:
        t: The endpoint's `Tables`.
        words: Rows of memory, as 32-bit words.
        longs: The same memory as 64-bit words.
        sizes: Out: the length of each datagram in bytes.
        ways: Out: the way of each datagram, a peer's number times the number of ports, plus a port. Datagrams of one
            way follow each other.
        now_us: The time.
        most: How many chunks each port may send, shape (ports,). Counted down. Replies are sent in any case.
    """
    n = t.numbers
    ranks, rank, ports = n[e.RANKS], n[e.RANK], n[e.PORTS]
    room = sizes.shape[0]
    count: Any = np.int64(
        0
    )  # a literal has a type of its own, for which numba would compile the callee again
    for peer in range(ranks):
        if peer != rank and room - count > 8 + e.LATE_REPLIES + ports:
            _watch(t, peer, now_us)
            count = reply(t, peer, words, sizes, ways, count, now_us)
    n[e.TURN] += 1
    _order_peers(t)
    for port in range(ports):
        for peer in t.turns:
            before = count
            count = _send_burst(t, peer, port, words, sizes, ways, count, now_us, most[port])
            most[port] -= count - before
    for i in range(count):
        peer = ways[i] // ports
        d.seal(longs[i], words[i], sizes[i], t.keys[peer, 0], t.hash_keys[peer, 0])
    n[e.SENT] += count
    return int(count)


@inner
def _order_peers(t: Any) -> None:
    """Sort `turns` by chunks left (rule 3). It is nearly sorted, and equals keep their order."""
    p, turns = t.peers, t.turns
    for place in range(turns.shape[0]):
        peer = turns[place]
        left = np.int64(0)
        for slot in range(e.SLOTS):
            if t.slots[slot, e.S_STAGE] != e.FREE:
                for phase in range(2):
                    outgoing = t.outgoing[slot, phase, peer]
                    if outgoing[e.O_ACTIVE]:
                        left += outgoing[e.O_CHUNKS] - outgoing[e.O_NEXT] + outgoing[e.O_QUEUED]
        p[peer, e.P_LEFT] = left
        at = place
        while at > 0 and p[turns[at - 1], e.P_LEFT] < left:
            turns[at] = turns[at - 1]
            at -= 1
        turns[at] = peer


@inner
def _watch(t: Any, peer: int, now_us: int) -> None:
    """Handle the timers of a peer: timeouts, grace, signs of life."""
    n, p = t.numbers, t.peers[peer]
    stuck = silent = 0
    silent_since = np.int64(0)
    for way in range(peer * n[e.PORTS], (peer + 1) * n[e.PORTS]):
        _watch_way(t, peer, way, now_us)
        w = t.ways[way]
        stuck += w[e.W_BACKOFF] > _MOST_TIMEOUTS and now_us - w[e.W_STUCK_SINCE] > n[e.SILENCE_US]
        silent += w[e.W_BACKOFF] > 0
        silent_since = max(silent_since, w[e.W_STUCK_SINCE])
    is_silent = silent == n[e.PORTS] and silent > 1
    p[e.P_IS_UNHEARD] = is_silent and now_us - silent_since > _UNHEARD_US
    if stuck == n[e.PORTS] and now_us - p[e.P_HEARD_AT] < n[e.SILENCE_US] // 2:
        n[e.STUCK_PEER] = peer  # it sends, but no longer datagram reaches it
    is_needed = False
    for slot in range(e.SLOTS):
        if t.slots[slot, e.S_STAGE] == e.FREE:
            continue
        for phase in range(2):
            outgoing, incoming = t.outgoing[slot, phase, peer], t.incoming[slot, phase, peer]
            if outgoing[e.O_ACTIVE]:
                is_needed = True
                if outgoing[e.O_END_AT] and now_us - outgoing[e.O_END_AT] > _end_pause_us(t, peer, outgoing):
                    outgoing[e.O_TRIES] += 1
                    end_again(outgoing)
            if incoming[e.I_CHUNKS] and not incoming[e.I_DONE]:
                is_needed = True
                if incoming[e.I_END_AT]:
                    judge(t, slot, phase, peer, now_us)
    if not (is_needed and p[e.P_IS_NEEDED]):
        p[e.P_HEARD_AT] = now_us  # its silence counts from when this rank first needed it
    elif now_us - p[e.P_HEARD_AT] > n[e.SILENCE_US]:
        spoke_us = p[e.P_HEARD_AT] - silent_since if silent == n[e.PORTS] else 0
        # The peer may have given up first: before, it kept sending while no longer datagram reached it.
        n[e.STUCK_PEER if spoke_us > n[e.SILENCE_US] // 4 else e.LOST_PEER] = peer
    p[e.P_IS_NEEDED] = 1 if is_needed else 0


@inner
def _watch_way(t: Any, peer: int, way: int, now_us: int) -> None:
    """Count datagrams that have been under way for too long as lost."""
    w, rate = t.ways[way], t.rates[way]
    timeout_us = _timeout_us(t, way)
    if w[e.W_FLYING] > 0 and now_us - w[e.W_PROGRESS_AT] > timeout_us << min(w[e.W_BACKOFF], _MOST_BACKOFF):
        for number in range(w[e.W_UNRESOLVED], w[e.W_NEXT]):
            if t.fates[way, number % e.RING] == e.IN_FLIGHT:
                give_up(t, peer, way, number)
        w[e.W_UNRESOLVED] = w[e.W_NEXT]
        w[e.W_PROGRESS_AT] = now_us
        if w[e.W_BACKOFF] == 0:
            w[e.W_STUCK_SINCE] = now_us
        w[e.W_BACKOFF] += 1
        window.note_silence(w, rate)


@inner
def _timeout_us(t: Any, way: int) -> int:
    """Return the time without progress after which datagrams under way are lost."""
    if not t.ways[way, e.W_HAS_DELAY]:
        return _FIRST_TIMEOUT_US  # no round trip is known yet
    return int(_LEAST_TIMEOUT_US + 2 * np.int64(t.rates[way, e.R_RTT]))


@inner
def _end_pause_us(t: Any, peer: int, outgoing: Any) -> int:
    """Return the time after which an END is repeated: once soon, then with growing pauses where packets are lost."""
    longest_us = 0
    for way in range(peer * t.numbers[e.PORTS], (peer + 1) * t.numbers[e.PORTS]):
        longest_us = max(longest_us, _timeout_us(t, way))
    tries = int(outgoing[e.O_TRIES])
    soon_us = _AGAIN_US << min(tries, 20)
    is_kept = (
        t.peers[peer, e.P_BEGUN] <= outgoing[e.O_NUMBER]
    )  # the peer has not begun it, and has little room for it
    if tries > 0 and (is_kept or not outgoing[e.O_HAS_LOST]):
        return longest_us << min(tries - 1, _MOST_BACKOFF)
    return min(soon_us, longest_us << _MOST_BACKOFF)


@inner
def _send_burst(
    t: Any, peer: int, port: int, words: Any, sizes: Any, ways: Any, count: int, now_us: int, most: int
) -> int:
    """Write a few chunks for a peer, as the window and pace of this way allow. Return the new count."""
    way = peer * t.numbers[e.PORTS] + port
    p, w, rate = t.peers[peer], t.ways[way], t.rates[way]
    if now_us < rate[e.R_NEXT_AT]:
        return count
    is_heard = heard_ports(t, peer) >> port & 1
    budget = min(np.int64(rate[e.R_WINDOW]) - w[e.W_FLYING], 2 * BURST, most, sizes.shape[0] - count)
    budget = min(budget, e.RING - (w[e.W_NEXT] - w[e.W_UNRESOLVED]))
    if not is_heard:
        budget = min(budget, 1 - w[e.W_FLYING])
    sent = 0
    newest = p[e.P_SENDING]
    for place_of in range(2 * e.SLOTS):
        collective, phase = newest - e.SLOTS + t.order[place_of] // 2, t.order[place_of] % 2
        slot = collective % e.SLOTS
        outgoing = t.outgoing[slot, phase, peer]
        if collective < 0 or outgoing[e.O_NUMBER] != collective or not outgoing[e.O_ACTIVE]:
            continue
        while sent < budget:
            if p[e.P_BEGUN] <= collective and p[e.P_EARLY] >= e.STASH:
                break
            chunk = _next_chunk(t, slot, phase, peer, port)
            if chunk == _NOTHING or (chunk == _ENDED and not is_heard):
                break
            is_early = p[e.P_BEGUN] <= collective
            is_repeated = chunk != _ENDED and t.chunk_state[slot, phase, peer, chunk] == e.QUEUED
            is_last = outgoing[e.O_QUEUED] < BURST and p[e.P_LEFT] <= max(rate[e.R_WINDOW], BURST)
            is_twice = is_repeated and is_last and not is_early and sent + 1 < budget
            for _ in range(2 if is_twice else 1):
                _write_chunk(t, slot, phase, way, chunk, words[count], sizes, ways, count, now_us)
                count += 1
                sent += 1
            p[e.P_EARLY] += is_early
            if not is_heard:
                queue(t, slot, phase, peer, chunk)
    if sent:
        pause_us = window.pause_us(w, rate)
        missed_us = max(BURST * pause_us, LONGEST_REST_US)  # a fast path carries many datagrams in a rest
        rate[e.R_NEXT_AT] = max(rate[e.R_NEXT_AT], now_us - missed_us) + sent * pause_us
    return count


@inner
def _next_chunk(t: Any, slot: int, phase: int, peer: int, port: int) -> int:
    """Return the chunk of a transfer that a port sends next; -1 for an END, -2 for nothing."""
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
    return _NOTHING if outgoing[e.O_ENDED] >> port & 1 else _ENDED


@inner
def _write_chunk(
    t: Any,
    slot: int,
    phase: int,
    way: int,
    chunk: int,
    word: Any,
    sizes: Any,
    ways: Any,
    at: int,
    now_us: int,
) -> None:
    """Write a DATA, or an END if `chunk` is -1, and remember its number."""
    n, w = t.numbers, t.ways[way]
    peer, port = way // n[e.PORTS], way % n[e.PORTS]
    p, outgoing = t.peers[peer], t.outgoing[slot, phase, peer]
    payload, collective = n[e.PAYLOAD], outgoing[e.O_NUMBER]
    number, order = w[e.W_NEXT], p[e.P_ORDER]
    flags, kind, length = phase | outgoing[e.O_FLAGS], d.DATA, 0
    if chunk == _ENDED:
        kind, length = d.END, d.END_BYTES - d.HEADER_BYTES
        flags &= ~d.DROPPABLE
        outgoing[e.O_ENDED] |= 1 << port
        outgoing[e.O_END_AT] = outgoing[e.O_END_AT] or now_us
        word[d.END_ORDER], word[d.END_PORTS] = order & 0xFFFFFFFF, heard_ports(t, peer)
        word[d.END_PAUSE] = _end_pause_us(t, peer, outgoing)
    else:
        length = chunk_bytes(outgoing[e.O_BYTES], outgoing[e.O_TAIL_BYTES], payload, chunk)
        copy_memory(word.ctypes.data + d.HEADER_BYTES, outgoing[e.O_ADDRESS] + chunk * payload, length)
        if phase == 0 and t.chunk_class[slot, peer, chunk]:
            flags |= d.PROTECTED
        if flags & d.PROTECTED or t.chunk_state[slot, phase, peer, chunk] != e.UNSENT:
            flags &= ~d.DROPPABLE  # nor is a repetition, because the bound is used up
        t.chunk_state[slot, phase, peer, chunk] = e.FLYING
        t.chunk_order[slot, phase, peer, chunk] = order
    d.write_header(
        word,
        kind,
        port,
        flags | (d.UNHEARD if p[e.P_IS_UNHEARD] else 0),
        n[e.RANK],
        collective,
        number,
        now_us + t.local_us[port],
        p[e.P_RECEIVING],
        max(chunk, 0),
        outgoing[e.O_CHUNKS],
        outgoing[e.O_PROTECTED],
    )
    sizes[at], ways[at] = d.HEADER_BYTES + length, way
    sent = t.ring[way, number % e.RING]
    place_of = (phase << 32) | max(chunk, 0)
    t.fates[way, number % e.RING] = e.IN_FLIGHT
    sent[e.G_COLLECTIVE], sent[e.G_NUMBER] = collective, number
    sent[e.G_CHUNK] = place_of if chunk >= 0 else -place_of - 1
    sent[e.G_ORDER] = order
    if w[e.W_FLYING] == 0:
        w[e.W_PROGRESS_AT] = now_us
    w[e.W_FLYING] += 1
    w[e.W_NEXT] = number + 1
    p[e.P_ORDER] = order + 1
