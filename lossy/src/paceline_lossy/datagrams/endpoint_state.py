"""The memory of an endpoint: tables of numbers that compiled code works on, and the names of their columns.

A collective reduces one vector: phase 0 sends every rank its shard of all ranks' vectors, phase 1 sends the reduced
shards to all, and behind each, if anything may be lost, a mask of whose chunks are missing in it. A transfer is
what one rank sends another in one phase: chunks of a datagram each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline_lossy.datagrams.universal_hash import num_pairs

SLOTS = 16  # collectives under way at once
RING = 8192  # datagrams to a peer that may be unresolved; a power of 2
WINDOW = 2048  # numbers below the largest that a receiver still takes; a power of 2
FEEDBACK_BITS = 512  # of these, so many a FEEDBACK tells about
STASH = 32  # datagrams from a peer that is ahead, kept until this rank begins the same collective
LATE_REPLIES = 16
TOLD = 1024  # of a peer's latest FEEDBACK, NACK, DONE and STATUS, whose numbers are remembered; a power of 2

# self: this endpoint
RANK, RANKS, PAYLOAD, BEGUN_HERE, OLDEST, TURN, STRANGERS, STALE, DUPLICATES, LOST_PEER, MISFIT_PEER = range(
    11
)
SILENCE_US, IS_CHANGED, SENT, REPEATED, MARKED, REPLAYED, STUCK_PEER, REPLY_FLAGS, PORTS = range(11, 20)
NUM_NUMBERS = 20

# slots: a collective
(
    S_COLLECTIVE,
    S_STAGE,
    S_BYTES,
    S_SHARD,
    S_ITEM,
    S_BOUND_PPM,
    S_PROTECT_PPM,
    S_IS_SCALED,
    S_IS_EARLY,
    S_MASK_ROOM,
    S_PRIORITY,
    NUM_S,
) = range(12)
FREE, REDUCING, ARRIVED_ALL, GATHERING, FINISHED, RETIRED = range(6)
"""Stages of a slot: ARRIVED_ALL is to be summed; it stays RETIRED while a peer may still need a repetition."""

# outgoing: a transfer to a peer; its number is a collective's; ENDED are the ports, a bit each, by which the latest END
# has left, TRIES how many went before it unanswered since something was last repeated, HAS_LOST whether anything was
(
    O_NUMBER,
    O_ACTIVE,
    O_CHUNKS,
    O_START,
    O_NEXT,
    O_QUEUED,
    O_CURSOR,
    O_FORGIVEN,
    O_ALLOWED,
    O_END_AT,
    O_TRIES,
    O_PROTECTED,
    O_ENDED,
    O_HAS_LOST,
    O_ADDRESS,
    O_BYTES,
    O_TAIL_BYTES,
    O_FLAGS,
    NUM_O,
) = range(19)
UNSENT, FLYING, DELIVERED, QUEUED, FORGIVEN = range(5)
"""States of a chunk at its sender."""

# incoming: a transfer from a peer; ENDED are the peer's ports by which an END has come since the last answer
(
    I_NUMBER,
    I_CHUNKS,
    I_GOT,
    I_GOT_PROTECTED,
    I_PROTECTED,
    I_DONE,
    I_END_AT,
    I_END_ORDER,
    I_ENDED,
    I_REPLY,
    I_ADDRESS,
    I_BYTES,
    I_TAIL_ADDRESS,
    I_TAIL_BYTES,
    NUM_I,
) = range(15)
NO_REPLY, REPLY_DONE, REPLY_NACK = range(3)

# peers: counts, times in microseconds; SENDING and RECEIVING are the transfers that have begun here, ORDER numbers all
# DATA and END to this peer, whichever way they take, PAUSE is the time after which it repeats an END; IS_UNHEARD says
# that nothing by any port was answered for long, ANSWERS_BY is 1 more than the port that answers take since the peer
# said so, and 0 if it never did; TURNED_AT is when it took the next port; SAID is the number of the latest FEEDBACK,
# NACK, DONE or STATUS to this peer, TOLD the largest of the peer's; LEFT are the chunks that are still to be sent
(
    P_BEGUN,
    P_EARLY,
    P_HEARD_AT,
    P_ASKED_AT,
    P_ANSWER,
    P_LATE,
    P_STASHED,
    P_REORDERED_AT,
    P_SENDING,
    P_RECEIVING,
    P_IS_NEEDED,
    P_ORDER,
    P_PAUSE,
    P_IS_UNHEARD,
    P_ANSWERS_BY,
    P_TURNED_AT,
    P_SAID,
    P_TOLD,
    P_LEFT,
    NUM_P,
) = range(20)

# ways: from this rank to a peer by one of this rank's ports, and the same of the peer's; counts, times in microseconds;
# RX_GAP is the largest number that was skipped when it should have come
(
    W_NEXT,
    W_UNRESOLVED,
    W_FLYING,
    W_MARKS_SEEN,
    W_ROUND_END,
    W_ROUND_GOOD,
    W_ROUND_LOST,
    W_ROUND_MARKED,
    W_IS_STARTING,
    W_REORDER,
    W_PROGRESS_AT,
    W_BACKOFF,
    W_STUCK_SINCE,
    W_HAS_DELAY,
    W_DELAY,
    W_RX_LARGEST,
    W_RX_GAP,
    W_RX_COUNT,
    W_RX_MARKED,
    W_RX_UNTOLD,
    W_RX_FIRST_UNTOLD_AT,
    W_RX_TIME,
    W_RX_TIME_AT,
    W_TELL_NOW,
    NUM_W,
) = range(25)

# rates: a way's, floating; times in microseconds; KEPT is the window when the queue was short, or while this way
# competed; MOST that at which it lost something then, 0 while it does not; GROWN_US how long it has grown since
(
    R_WINDOW,
    R_RTT,
    R_ALPHA,
    R_NEXT_AT,
    R_MIN_WAIT,
    R_HEARD_AT,
    R_ROUND_WAIT,
    R_ROUND_AT,
    R_SHORT_AT,
    R_KEPT,
    R_MOST,
    R_GROWN_US,
    NUM_R,
) = range(13)

# ring: a datagram that was sent
G_COLLECTIVE, G_CHUNK, G_NUMBER, G_ORDER, NUM_G = range(5)
GONE, IN_FLIGHT, ARRIVED, MISSING = range(4)
"""What became of it (`fates`)."""

Numbers = NDArray[np.int64]
Bytes = NDArray[np.uint8]


class Tables(NamedTuple):
    """All of an endpoint's memory but what it sends and receives, of which it has the addresses."""

    numbers: Numbers
    slots: Numbers
    outgoing: Numbers  # slot, phase, peer, column
    incoming: Numbers
    peers: Numbers
    ways: Numbers  # peer * number of ports + port, column
    rates: NDArray[np.float64]  # way, column
    ring: Numbers  # way, number % RING, column
    fates: Bytes  # way, number % RING
    keys: NDArray[np.uint64]  # peer; sending and receiving; two halves
    hash_keys: NDArray[
        np.uint32
    ]  # peer; sending and receiving; of words of the first half, and of the second; pair
    chunk_state: Bytes  # slot, phase, peer, chunk
    chunk_order: Numbers  # of its latest datagram
    chunk_class: Bytes  # slot, peer, chunk: 1 is protected
    have: Bytes  # slot, phase, peer, chunk
    seen: Bytes  # way, number % WINDOW
    told: Numbers  # peer, number % TOLD: the number itself
    late: Numbers  # peer, entry, (collective, phase)
    stash: Bytes  # peer, entry, bytes
    stash_sizes: Numbers
    local_us: Numbers  # by port: how long what is sent now waits in this host's own queue, if that is known
    turns: Numbers  # the peers, who is served first: whom most is left to be sent to
    order: Numbers  # of transfers to a peer, first served first: 2 * collective + phase, the oldest possible being 0


def new_tables(
    rank: int, num_ranks: int, payload_bytes: int, header_bytes: int, chunks: int, num_ports: int
) -> Tables:
    """Memory for transfers of up to `chunks` chunks."""

    def zeros(*shape: int) -> Numbers:
        return np.zeros(shape, np.int64)

    numbers = zeros(NUM_NUMBERS)
    numbers[RANK], numbers[RANKS], numbers[PAYLOAD] = rank, num_ranks, payload_bytes
    numbers[PORTS] = num_ports
    numbers[LOST_PEER] = numbers[MISFIT_PEER] = numbers[STUCK_PEER] = -1
    slots = zeros(SLOTS, NUM_S)
    slots[:, S_COLLECTIVE] = -1
    outgoing, incoming = zeros(SLOTS, 2, num_ranks, NUM_O), zeros(SLOTS, 2, num_ranks, NUM_I)
    outgoing[..., O_NUMBER] = incoming[..., I_NUMBER] = -1
    return Tables(
        numbers=numbers,
        slots=slots,
        outgoing=outgoing,
        incoming=incoming,
        peers=zeros(num_ranks, NUM_P),
        ways=zeros(num_ranks * num_ports, NUM_W),
        rates=np.zeros((num_ranks * num_ports, NUM_R)),
        ring=zeros(num_ranks * num_ports, RING, NUM_G),
        fates=np.zeros((num_ranks * num_ports, RING), np.uint8),
        keys=np.zeros((num_ranks, 2, 2), np.uint64),
        hash_keys=np.zeros((num_ranks, 2, 2, num_pairs(payload_bytes)), np.uint32),
        seen=np.zeros((num_ranks * num_ports, WINDOW), np.uint8),
        told=zeros(num_ranks, TOLD),
        late=zeros(num_ranks, LATE_REPLIES, 2),
        stash=np.zeros((num_ranks, STASH, header_bytes + payload_bytes), np.uint8),
        stash_sizes=zeros(num_ranks, STASH),
        local_us=zeros(num_ports),
        turns=np.array([(rank + 1 + i) % num_ranks for i in range(num_ranks - 1)], np.int64),
        order=np.arange(2 * SLOTS),
        **_per_chunk(num_ranks, chunks),
    )


def with_room(tables: Tables, chunks: int) -> Tables:
    """The same memory, with room for transfers of `chunks` chunks."""
    room = tables.have.shape[3]
    if chunks <= room:
        return tables
    grown = _per_chunk(tables.have.shape[2], max(chunks, 2 * room))
    for name, table in grown.items():
        table[..., :room] = getattr(tables, name)
    return tables._replace(**grown)


def _per_chunk(num_ranks: int, chunks: int) -> dict[str, Any]:
    return {
        "chunk_state": np.zeros((SLOTS, 2, num_ranks, chunks), np.uint8),
        "chunk_order": np.zeros((SLOTS, 2, num_ranks, chunks), np.int64),
        "chunk_class": np.zeros((SLOTS, num_ranks, chunks), np.uint8),
        "have": np.zeros((SLOTS, 2, num_ranks, chunks), np.uint8),
    }
