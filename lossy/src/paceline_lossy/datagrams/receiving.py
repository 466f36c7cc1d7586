"""Handles the datagrams that arrive at an endpoint: check, place, acknowledge. Compiled; many at a time.

Rules
1. A datagram without the right code comes from a stranger. It is counted, and changes nothing.
2. A number that was received before is a duplicate or a replay. It is counted, and changes nothing else. So only new
   datagrams are a sign of life.
3. A transfer ends when everything has arrived. It also ends when its sender has sent everything, and at least the
   promised part of each class is here. With `is_early` it ends as soon as that part is here. Later datagrams are
   answered and dropped.
4. A datagram of a collective that this rank has not begun is kept. It counts as lost if there is no room.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline_lossy.datagrams import datagram as d
from paceline_lossy.datagrams import endpoint_state as e
from paceline_lossy.datagrams.machine_code import compiled, copy_memory, inner
from paceline_lossy.datagrams.resolving import take_feedback, take_nack
from paceline_lossy.datagrams.shards import chunk_bytes, num_chunks

_GRACE_US = 2000
_REMEMBER_US = 10_000_000
_TURN_US = 100_000  # how long answers use a port before the next is tried; longer than a round trip
# So many datagrams, of all ports and of one port, are acknowledged before the delay of FEEDBACK is over.
_PROMPT, _LEAST_PROMPT = 16, 4


@compiled
def allowed_losses(droppable: int, bound_ppm: int) -> int:
    """Return how many of a transfer's droppable chunks may be missing. The last may be short, so it does not count."""
    return max(0, (droppable - 1) * bound_ppm // 1_000_000)


@compiled
def take_datagrams(
    t: Any, rows: Any, words: Any, longs: Any, sizes: Any, marks: Any, count: int, now_us: int
) -> None:
    """Take `count` datagrams.

    Args:
        t: The endpoint's `Tables`.
        rows: The bytes of the datagrams, one per row.
        words: The same memory as 32-bit words.
        longs: The same memory as 64-bit words.
        sizes: The length of each datagram in bytes.
        marks: Whether each carried a congestion mark.
        count: Number of datagrams.
        now_us: The time.
    """
    for i in range(count):
        _take(t, rows[i], words[i], longs[i], sizes[i], marks[i], now_us)


@inner
def _take(t: Any, row: Any, word: Any, long: Any, size: int, mark: int, now_us: int) -> None:
    n = t.numbers
    if size < d.HEADER_BYTES or size > d.HEADER_BYTES + n[e.PAYLOAD]:
        n[e.STRANGERS] += 1
        return
    who = np.int64(word[d.SENDER_KIND])
    peer, kind, port, flags = who & 0xFFFF, (who >> 16) & 0xF, (who >> 20) & 0xF, who >> 24
    if (
        peer >= n[e.RANKS]
        or peer == n[e.RANK]
        or port >= n[e.PORTS]
        or not d.is_sealed(long, word, size, t.keys[peer, 1], t.hash_keys[peer, 1])
    ):
        n[e.STRANGERS] += 1
        return
    p, way = t.peers[peer], peer * n[e.PORTS] + port
    begun = d.widened(np.int64(word[d.BEGUN]), p[e.P_BEGUN])
    if begun > p[e.P_BEGUN]:
        p[e.P_BEGUN] = begun
        p[e.P_EARLY] = 0
    if kind not in (d.DATA, d.END):
        number = word[d.COLLECTIVE] if kind == d.FEEDBACK else word[d.NUMBER]
        if _was_told(t, peer, d.widened(np.int64(number), p[e.P_TOLD])):
            n[e.REPLAYED] += 1
            return
        p[e.P_HEARD_AT] = now_us
    if kind == d.FEEDBACK:
        take_feedback(t, peer, way, row, word, size, now_us)
        return
    if kind == d.STATUS:
        if flags & d.ASK:
            p[e.P_ANSWER] = 1
        return
    phase = flags & d.GATHER
    if kind in (d.DATA, d.END):
        collective = d.widened(np.int64(word[d.COLLECTIVE]), p[e.P_RECEIVING])
        is_here = collective >= 0 and t.incoming[collective % e.SLOTS, phase, peer, e.I_NUMBER] == collective
        if kind == d.END:
            p[e.P_PAUSE] = word[d.END_PAUSE]
        _take_numbered(t, peer, way, collective, is_here, row, word, size, mark, now_us)
        return
    collective = d.widened(np.int64(word[d.COLLECTIVE]), p[e.P_SENDING])
    slot = collective % e.SLOTS
    is_here = collective >= 0 and t.outgoing[slot, phase, peer, e.O_NUMBER] == collective
    if kind == d.DONE:
        if is_here:
            t.outgoing[slot, phase, peer, e.O_ACTIVE] = 0
            n[e.IS_CHANGED] = 1
            p[e.P_IS_NEEDED] = 0  # until `_watch` looks for it again
    elif kind == d.NACK and is_here:
        take_nack(t, slot, phase, peer, row, word, size)


@inner
def _was_told(t: Any, peer: int, number: int) -> bool:
    """Return whether this number of a peer's has come before, or is too old to tell. Remember it."""
    p, told = t.peers[peer], t.told[peer]
    if number <= p[e.P_TOLD] - e.TOLD or told[number % e.TOLD] == number:
        return True
    told[number % e.TOLD] = number
    p[e.P_TOLD] = max(p[e.P_TOLD], number)
    return False


@inner
def _take_numbered(
    t: Any,
    peer: int,
    way: int,
    collective: int,
    is_here: bool,
    row: Any,
    word: Any,
    size: int,
    mark: int,
    now_us: int,
) -> None:
    """Take a DATA or an END."""
    n, p, w = t.numbers, t.peers[peer], t.ways[way]
    number = d.widened(np.int64(word[d.NUMBER]), max(w[e.W_RX_LARGEST], 0))
    largest = w[e.W_RX_LARGEST]
    if number < 0 or number <= largest - e.WINDOW or (number <= largest and t.seen[way, number % e.WINDOW]):
        n[e.REPLAYED] += 1
        w[e.W_TELL_NOW] = 1  # the FEEDBACK on it may have been lost
        return
    p[e.P_HEARD_AT] = now_us
    is_unheard = np.int64(word[d.SENDER_KIND]) >> 24 & d.UNHEARD
    if is_unheard and now_us - p[e.P_TURNED_AT] > _TURN_US:
        p[e.P_ANSWERS_BY], p[e.P_TURNED_AT] = p[e.P_ANSWERS_BY] % n[e.PORTS] + 1, now_us
    if not is_here and collective >= p[e.P_RECEIVING]:
        kept = p[e.P_STASHED]
        if kept == e.STASH:
            return
        copy_memory(t.stash[peer, kept].ctypes.data, row.ctypes.data, size)
        t.stash_sizes[peer, kept] = size
        p[e.P_STASHED] = kept + 1
    _note_number(t, peer, way, number, np.int64(word[d.TIME]), mark, now_us)
    if is_here:
        place(t, peer, row, word, size, now_us)
    elif collective < p[e.P_RECEIVING]:
        _reply_late(t, peer, collective, (np.int64(word[d.SENDER_KIND]) >> 24) & d.GATHER)


@inner
def _note_number(t: Any, peer: int, way: int, number: int, sent_at: int, mark: int, now_us: int) -> None:
    w = t.ways[way]
    largest = w[e.W_RX_LARGEST]
    if number > largest:
        for skipped in range(max(largest + 1, number - e.WINDOW + 1), number):
            t.seen[way, skipped % e.WINDOW] = 0
        if number > largest + 1:
            w[e.W_RX_GAP] = number - 1
        w[e.W_RX_LARGEST] = number
        w[e.W_RX_TIME], w[e.W_RX_TIME_AT] = sent_at, now_us
    else:
        t.peers[peer, e.P_REORDERED_AT] = now_us
    t.seen[way, number % e.WINDOW] = 1
    w[e.W_RX_COUNT] += 1
    w[e.W_RX_MARKED] += mark
    if w[e.W_RX_UNTOLD] == 0:
        w[e.W_RX_FIRST_UNTOLD_AT] = now_us
    w[e.W_RX_UNTOLD] += 1
    if w[e.W_RX_UNTOLD] >= max(_LEAST_PROMPT, _PROMPT // t.numbers[e.PORTS]):
        w[e.W_TELL_NOW] = 1


@inner
def _reply_late(t: Any, peer: int, collective: int, phase: int) -> None:
    """Answer DONE for a collective that this rank has finished and forgotten."""
    p = t.peers[peer]
    t.numbers[e.STALE] += 1
    for entry in range(p[e.P_LATE]):
        if t.late[peer, entry, 0] == collective and t.late[peer, entry, 1] == phase:
            return
    if p[e.P_LATE] < e.LATE_REPLIES:
        t.late[peer, p[e.P_LATE], 0] = collective
        t.late[peer, p[e.P_LATE], 1] = phase
        p[e.P_LATE] += 1


@compiled
def place(t: Any, peer: int, row: Any, word: Any, size: int, now_us: int) -> None:
    """Place a DATA or an END of a collective that is under way."""
    n = t.numbers
    who = np.int64(word[d.SENDER_KIND])
    flags, kind = who >> 24, (who >> 16) & 0xF
    phase = flags & d.GATHER
    slot = d.widened(np.int64(word[d.COLLECTIVE]), t.peers[peer, e.P_RECEIVING]) % e.SLOTS
    incoming = t.incoming[slot, phase, peer]
    chunk, chunks = np.int64(word[d.CHUNK]), incoming[e.I_CHUNKS]
    if np.int64(word[d.CHUNKS]) != chunks:
        n[e.MISFIT_PEER] = peer
        return
    if phase == 1:
        t.outgoing[slot, 0, peer, e.O_ACTIVE] = 0  # a peer that sends its reduced shard has all contributions
    if incoming[e.I_DONE]:
        incoming[e.I_REPLY] = e.REPLY_DONE
        n[e.DUPLICATES] += 1
        return
    if phase == 0:
        incoming[e.I_PROTECTED] = min(np.int64(word[d.AUX]), chunks)
    if kind == d.END:
        t.ways[peer * n[e.PORTS] + ((who >> 20) & 0xF), e.W_TELL_NOW] = 1
        _note_end(incoming, word, now_us)
    else:
        payload = n[e.PAYLOAD]
        length = chunk_bytes(incoming[e.I_BYTES], incoming[e.I_TAIL_BYTES], payload, min(chunk, chunks - 1))
        if chunk >= chunks or size - d.HEADER_BYTES != length:
            n[e.MISFIT_PEER] = peer
            return
        if t.have[slot, phase, peer, chunk]:
            n[e.DUPLICATES] += 1
            return
        first_of_tail = num_chunks(incoming[e.I_BYTES], payload)
        target = incoming[e.I_ADDRESS] + chunk * payload
        if chunk >= first_of_tail:
            target = incoming[e.I_TAIL_ADDRESS] + (chunk - first_of_tail) * payload
        copy_memory(target, row.ctypes.data + d.HEADER_BYTES, length)
        t.have[slot, phase, peer, chunk] = 1
        incoming[e.I_GOT] += 1
        if flags & d.PROTECTED:
            incoming[e.I_GOT_PROTECTED] += 1
    judge(t, slot, phase, peer, now_us)


@inner
def _note_end(incoming: Any, word: Any, now_us: int) -> None:
    """Note that a port of the sender has sent everything.

    Once all its ports have, every chunk that was not lost is here.
    """
    order = np.int64(word[d.END_ORDER])
    earlier = incoming[e.I_END_ORDER]
    is_first = incoming[e.I_ENDED] == 0
    incoming[e.I_END_ORDER] = order if is_first or d.widened(order, earlier) < earlier else earlier
    incoming[e.I_ENDED] |= 1 << ((np.int64(word[d.SENDER_KIND]) >> 20) & 0xF)
    if np.int64(word[d.END_PORTS]) & ~incoming[e.I_ENDED] == 0:
        incoming[e.I_END_AT] = now_us


@inner
def judge(t: Any, slot: int, phase: int, peer: int, now_us: int) -> None:
    """End a transfer if it may end. Ask for the rest if its sender has sent everything."""
    incoming = t.incoming[slot, phase, peer]
    chunks, got = incoming[e.I_CHUNKS], incoming[e.I_GOT]
    if incoming[e.I_DONE]:
        return
    bound_ppm = t.slots[slot, e.S_BOUND_PPM] if phase == 0 else 0
    protected = incoming[e.I_PROTECTED]
    allowed = allowed_losses(chunks - protected, bound_ppm)
    is_enough = incoming[e.I_GOT_PROTECTED] >= protected and chunks - got <= allowed
    if got < chunks and not (is_enough and t.slots[slot, e.S_IS_EARLY]):
        if incoming[e.I_END_AT] == 0:
            return
        was_reordered = t.peers[peer, e.P_REORDERED_AT]
        if (
            was_reordered
            and now_us - was_reordered < _REMEMBER_US
            and now_us < incoming[e.I_END_AT] + _GRACE_US
        ):
            return  # the END may have overtaken what is missing
        if not is_enough:
            incoming[e.I_REPLY] = e.REPLY_NACK
            incoming[e.I_END_AT] = incoming[e.I_ENDED] = 0
            return
    incoming[e.I_DONE] = 1
    incoming[e.I_REPLY] = e.REPLY_DONE
    t.peers[peer, e.P_IS_NEEDED] = 0
    t.numbers[e.IS_CHANGED] = 1
