"""The compiled loop that moves an endpoint's datagrams: receive, take, transmit, send, rest; without the interpreter.

Rules
1. It returns on events that Python must handle: a collective finished, a peer was lost, another thread woke the loop.
2. It sends no faster than the kernel takes datagrams. Refused datagrams are sent before new ones are written.
3. The kernel's queue holds only as many chunks as keep the link busy until the next turn (`queue_room`). So the choice
   of the peer and the pace is made as late as possible, and peers are served evenly. The wait in this queue is not the
   network's, so it is left out of the measured delay (`note_drain`).
4. While transfers are under way it rests for a while rather than until the next datagram, so that one turn handles
   several. A wake-up per datagram would cost more than handling it. It rests longer while the kernel's queue lasts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline_lossy.datagrams import endpoint_state as e
from paceline_lossy.datagrams import system_calls as system
from paceline_lossy.datagrams.endpoint import Endpoint
from paceline_lossy.datagrams.machine_code import compiled, inner
from paceline_lossy.datagrams.receiving import take_datagrams
from paceline_lossy.datagrams.sending import BURST, LONGEST_REST_US, advance, transmit

HAPPENED, CALLED, TIME_IS_UP, FAILED = range(4)
"""The loop's reasons to return. After FAILED, `status[3]` is the kernel's error number."""

_REST_US = 300
_BATCHES = 4
_IDLE_US = 50_000
_PENDING, _SENT_UPTO, _SEGMENTS, _ERROR = range(4)


SMALLEST_LIMIT, LARGEST_LIMIT = 16 * 1024, 1024 * 1024
_PERIOD_TURNS = 128
_LIMIT, _LOWEST, _TURNS, WAS_FULL = range(4)
_RATE, _FILLED, _FILLED_AT = range(3)
_LONGEST_LOCAL_US = 2500


class Io(NamedTuple):
    """The memory of the loop."""

    incoming: system.Batch
    outgoing: system.Batch
    descriptors: NDArray[np.int64]  # the socket to wait for, and the event that wakes the loop
    events: NDArray[np.int64]
    scratch: NDArray[np.int64]
    ports: NDArray[np.int64]  # the sockets that send; the first also receives
    # A port's queue in the kernel: limit, lowest length seen, turns, whether it was full.
    local: NDArray[np.int64]
    most: NDArray[np.int64]  # chunks that may leave by each port in this turn
    # A port's queue: bytes per microsecond, length when it was last filled, time of that.
    drain: NDArray[np.float64]
    status: NDArray[np.int64]  # messages pending, of these sent, segments of a message, error


def new_io(
    ports: Sequence[int], wake: int, rows: int, row_bytes: int, addresses: NDArray[np.int64], segments: int
) -> Io:
    """Return memory for batches of `rows` datagrams over sockets. The first socket receives."""
    return Io(
        incoming=system.new_batch(rows, row_bytes, addresses),
        outgoing=system.new_batch(rows, row_bytes, addresses),
        descriptors=np.array([ports[0], wake], np.int64),
        events=np.array([system.POLL_IN, system.POLL_IN], np.int64),
        scratch=np.zeros(4, np.int64),
        ports=np.array(ports, np.int64),
        local=np.array([[SMALLEST_LIMIT // len(ports), LARGEST_LIMIT, 0, 0]] * len(ports), np.int64),
        most=np.zeros(len(ports), np.int64),
        drain=np.zeros((len(ports), 3)),
        status=np.array([0, 0, segments, 0], np.int64),
    )


def compile_all() -> None:
    """Compile everything, or load it from disk, so that no rank waits for it later. Local; takes seconds only once."""
    endpoint = Endpoint(0, 2, {1: bytes(32)}, 8, 1)
    drive(endpoint.tables, new_io([-1], -1, 2, endpoint.row_bytes, np.zeros((2, 2), np.int64), 1), 0)


@compiled
def drive(t: Any, io: Any, slice_us: int) -> int:
    """Move datagrams until an event, at most for `slice_us`. Return the reason."""
    until = system.now_us(io.scratch) + slice_us
    while True:
        got = system.receive_batch(io.ports[0], io.incoming)
        # Read after receiving. Read before, datagrams that came while this thread waited for a core came too early.
        now = system.now_us(io.scratch)
        if got > 0:
            batch = io.incoming
            take_datagrams(t, batch.rows, batch.words, batch.longs, batch.sizes, batch.marks, got, now)
            if t.numbers[e.IS_CHANGED]:
                advance(t, now)
        sent = _send(t, io, now)
        if sent < 0:
            return FAILED
        if t.numbers[e.IS_CHANGED]:
            advance(t, now)
        is_active = False
        for slot in range(e.SLOTS):
            stage = t.slots[slot, e.S_STAGE]
            if stage in (e.ARRIVED_ALL, e.FINISHED):
                return HAPPENED
            is_active = is_active or stage != e.FREE
        if max(t.numbers[e.LOST_PEER], t.numbers[e.MISFIT_PEER], t.numbers[e.STUCK_PEER]) >= 0:
            return HAPPENED
        if now > until:
            return TIME_IS_UP
        if got < io.incoming.sizes.shape[0]:
            is_blocked = io.status[_PENDING] > io.status[_SENT_UPTO]
            io.events[0] = system.POLL_OUT if is_blocked else (0 if is_active else system.POLL_IN)
            full = io.outgoing.ports[io.status[_SENT_UPTO]] if is_blocked else 0
            io.descriptors[0] = io.ports[full]
            rest_us = _IDLE_US if not is_active else _REST_US if sent > 0 else _rest_us(io.drain)
            system.wait_for(io.descriptors, io.events, io.scratch, rest_us)
            if io.scratch[3] >> 48:
                return CALLED


@inner
def _send(t: Any, io: Any, now: int) -> int:
    """Send the pending datagrams, and then those that should leave now.

    Return 1 if more may be due, 0 if not, -1 if the kernel refuses.
    """
    batch, status = io.outgoing, io.status
    is_cut_short = True
    for _ in range(_BATCHES):
        if status[_PENDING] == status[_SENT_UPTO]:
            ports = io.ports.shape[0]
            for port in range(ports):
                queued = system.queued_bytes(io.ports[port], io.scratch)
                t.local_us[port] = note_drain(io.drain[port], queued, now)
                row_bytes = batch.rows.shape[1]
                # A smaller limit makes ports wait for each other's turns.
                smallest = max(SMALLEST_LIMIT // ports, 2 * row_bytes)
                io.most[port] = queue_room(io.local[port], queued, row_bytes, smallest)
            count = transmit(t, batch.words, batch.longs, batch.sizes, batch.ways, now, io.most)
            for port in range(ports):
                if io.most[port] == 0:
                    io.local[port, WAS_FULL] = 1
            is_cut_short = count >= 2 * BURST  # otherwise every peer was sent all that it may be sent now
            status[_SENT_UPTO] = 0
            status[_PENDING] = system.prepare_messages(batch, count, status[_SEGMENTS], ports)
            if count == 0:
                return 0
        while status[_SENT_UPTO] < status[_PENDING]:
            taken = system.send_messages(io.ports, batch, status[_SENT_UPTO], status[_PENDING])
            if taken > 0:
                status[_SENT_UPTO] += taken
            elif taken in (-system.AGAIN, -system.NO_BUFFER):
                return 0
            elif taken in (-system.INVALID, -system.IO_ERROR) and status[_SEGMENTS] > 1:
                status[_SEGMENTS] = 1  # no segmentation offload here: send them again, one by one
                status[_PENDING] = _restart(batch, status, io.ports.shape[0])
            else:
                status[_ERROR] = -taken
                status[_SENT_UPTO] += 1  # it counts as lost
                if -taken == system.TOO_LONG:
                    return -1
        if not is_cut_short:
            break
    for port in range(io.ports.shape[0]):
        io.drain[port, _FILLED] = system.queued_bytes(io.ports[port], io.scratch)
        io.drain[port, _FILLED_AT] = now
    return 1 if is_cut_short else 0


@compiled
def _rest_us(drain: Any) -> int:
    """Return how long to rest while transfers are under way: until half of the shortest queue has left."""
    lasts_us = 2.0 * LONGEST_REST_US
    for port in range(drain.shape[0]):
        queued, rate = drain[port, _FILLED], drain[port, _RATE]
        lasts_us = min(lasts_us, queued / rate if rate else 0.0)
    return int(max(_REST_US, lasts_us / 2.0))


@compiled
def note_drain(drain: Any, queued: int, now: int) -> int:
    """Measure how fast a port's queue in the kernel drains; return how many microseconds `queued` bytes take.

    Between two turns nothing is added. A queue that ran empty between them says nothing about its rate. The result is
    at most half the target of the congestion window. Between network namespaces the kernel counts sent bytes until the
    receiver's side has them, so a larger result would include the network's queue.
    """
    passed_us = now - drain[_FILLED_AT]
    if 0 < queued < drain[_FILLED] and passed_us > 0:
        rate = (drain[_FILLED] - queued) / passed_us
        # A rate that is too high does no harm, so it is followed faster.
        weight = 1.0 if drain[_RATE] == 0 else 0.25 if rate > drain[_RATE] else 0.0625
        drain[_RATE] += weight * (rate - drain[_RATE])
    drain[_FILLED], drain[_FILLED_AT] = queued, now
    return int(min(queued / drain[_RATE], _LONGEST_LOCAL_US)) if drain[_RATE] else 0


@compiled
def queue_room(local: Any, queued: int, row_bytes: int, smallest: int = SMALLEST_LIMIT) -> int:
    """Return how many chunks may be added to the kernel's queue of `queued` bytes. Adapt the queue's limit.

    If the queue was full and is empty now, it was too short for the time between turns, so its limit doubles. If it
    never got short, the limit shrinks by the bytes that were always left over.

    Source:
        Herbert 2011, "Byte queue limits" (Linux, lib/dynamic_queue_limits.c), the idea.
    """
    if local[WAS_FULL]:
        if queued == 0:
            local[_LIMIT] = min(2 * local[_LIMIT], LARGEST_LIMIT)
            local[_TURNS], local[_LOWEST] = 0, LARGEST_LIMIT
        local[_LOWEST] = min(local[_LOWEST], queued)
        local[_TURNS] += 1
        if local[_TURNS] >= _PERIOD_TURNS:
            spare = max(0, local[_LOWEST] - local[_LIMIT] // 4)
            local[_LIMIT] = max(local[_LIMIT] - spare, smallest)
            local[_TURNS], local[_LOWEST] = 0, LARGEST_LIMIT
    most = max(0, local[_LIMIT] - queued) // row_bytes
    local[WAS_FULL] = most == 0
    return int(most)


@inner
def _restart(batch: Any, status: Any, ports: int) -> int:
    """Describe the datagrams that were not sent again, each as its own message."""
    first = 0
    for message in range(status[_SENT_UPTO]):
        first += batch.covered[message]
    # Literals have types of their own, for which numba would compile the callee again.
    count, one = np.int64(0), np.int64(1)
    for message in range(status[_PENDING]):
        count += batch.covered[message]
    made = system.prepare_messages(batch, int(count), int(one), ports)
    status[_SENT_UPTO] = first
    return int(made)
