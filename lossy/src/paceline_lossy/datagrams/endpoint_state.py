"""The memory of an endpoint: tables of numbers that compiled code works on, and the names of their columns.

A collective reduces one vector. In phase 0 every rank sends each other rank that rank's shard of its vector. In phase
1 every rank sends its reduced shard to all. If anything may be lost, a mask follows each reduced shard that names the
missing chunks. A transfer is what one rank sends another in one phase, in chunks of one datagram each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline_lossy.datagrams.authentication import num_pairs

SLOTS = 16  # collectives under way at once
RING = 8192  # datagrams to a peer that may be unresolved; a power of 2
WINDOW = 2048  # numbers below the largest that a receiver still takes; a power of 2
FEEDBACK_BITS = 512  # how many of these one FEEDBACK reports
STASH = 32  # datagrams from a peer that is ahead, kept until this rank begins the same collective
LATE_REPLIES = 16
TOLD = (
    1024  # how many numbers of a peer's latest FEEDBACK, NACK, DONE and STATUS are remembered; a power of 2
)

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
"""Stages of a slot. ARRIVED_ALL is ready to be summed. RETIRED lasts while a peer may still need a repetition."""

# outgoing: a transfer to a peer. NUMBER is the collective's. ENDED has one bit for each port by which the latest END
# left. TRIES counts the ENDs without an answer since a chunk was last repeated. HAS_LOST: whether a chunk was lost.
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

# incoming: a transfer from a peer. ENDED has one bit for each port of the peer by which an END came since the last
# answer.
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

# peers: counts, and times in microseconds. SENDING and RECEIVING count the transfers that have begun here. ORDER
# numbers all DATA and END to this peer, on all ways. PAUSE is the time after which the peer repeats an END.
# IS_UNHEARD: nothing sent by any port was answered for a long time. ANSWERS_BY is the port of the answers plus 1 since
# the peer said that it is unheard, and 0 if it never did. TURNED_AT is the time of the last change of that port. SAID
# is the number of the latest FEEDBACK, NACK, DONE or STATUS to this peer, TOLD the largest number from this peer. LEFT
# counts the chunks still to send.
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

# ways: from this rank to a peer by one of this rank's ports; RX: from the peer by its port of that number. Counts, and
# times in microseconds. RX_GAP is the largest number that had not come when a later one came.
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

# rates: floating numbers of a way; times in microseconds. KEPT is the window when the queue was short, or while this
# way competed. MOST is the window at the last loss of the competition, 0 without one. GROWN_US: how long it grew since.
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
"""The fate of a datagram (`fates`)."""

Numbers = NDArray[np.int64]
Bytes = NDArray[np.uint8]


class Tables(NamedTuple):
    """All of an endpoint's memory except vectors and buffers, which it knows by their addresses."""

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
    hash_keys: NDArray[np.uint32]  # peer; sending and receiving; first and second half of the words; pair
    chunk_state: Bytes  # slot, phase, peer, chunk
    chunk_order: Numbers  # of its latest datagram
    chunk_class: Bytes  # slot, peer, chunk: 1 is protected
    have: Bytes  # slot, phase, peer, chunk
    seen: Bytes  # way, number % WINDOW
    told: Numbers  # peer, number % TOLD: the number itself
    late: Numbers  # peer, entry, (collective, phase)
    stash: Bytes  # peer, entry, bytes
    stash_sizes: Numbers
    local_us: Numbers  # by port: how long a datagram sent now waits in this host's own queue; 0 if unknown
    turns: Numbers  # the peers in the order of service: most chunks left first
    order: Numbers  # transfers to a peer in the order of service: 2 * collective + phase; the oldest possible is 0


def new_tables(
    rank: int, num_ranks: int, payload_bytes: int, header_bytes: int, chunks: int, num_ports: int
) -> Tables:
    """Return memory for transfers of up to `chunks` chunks."""

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
    """Return the same memory with room for transfers of `chunks` chunks."""
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
