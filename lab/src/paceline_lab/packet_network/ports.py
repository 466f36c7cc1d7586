"""What a port does with packets, and the events that move them on; compiled.

Rules
1. Time goes from event to event; of two at the same time the one that was planned first comes first.
2. A packet's memory is taken when it is sent and given back when it is dropped or taken by its receiver.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline_lab.packet_network import state as s
from paceline_lab.packet_network.leaf_spine import BANDS
from paceline_lab.packet_network.machine_code import compiled

_ANY_SPINE = -1


@compiled
def plan(net: Any, when: int, kind: int, index: int) -> None:
    """Add an event."""
    events, clock = net.events, net.clock
    at = clock[s.EVENTS]
    if at >= events.shape[0]:
        clock[s.IS_FULL] = 1
        return
    clock[s.EVENTS] += 1
    clock[s.ORDER] += 1
    while at > 0:
        above = (at - 1) >> 1
        if events[above, s.E_TIME] <= when:
            break
        for column in range(s.NUM_E):
            events[at, column] = events[above, column]
        at = above
    events[at, s.E_TIME], events[at, s.E_ORDER] = when, clock[s.ORDER]
    events[at, s.E_WHAT] = (kind << s.KIND_SHIFT) | index


@compiled
def take_event(net: Any) -> int:
    """Remove the earliest event, let its time be now, and return what it is."""
    events, clock = net.events, net.clock
    what = events[0, s.E_WHAT]
    clock[s.NOW] = events[0, s.E_TIME]
    clock[s.EVENTS] -= 1
    last = clock[s.EVENTS]
    when, order = events[last, s.E_TIME], events[last, s.E_ORDER]
    at = 0
    while True:
        below = 2 * at + 1
        if below >= last:
            break
        if below + 1 < last and _is_before(events, below + 1, below):
            below += 1
        earlier = events[below, s.E_TIME]
        if earlier > when or (earlier == when and events[below, s.E_ORDER] > order):
            break
        for column in range(s.NUM_E):
            events[at, column] = events[below, column]
        at = below
    for column in range(s.NUM_E):
        events[at, column] = events[last, column]
    return int(what)


@compiled
def _is_before(events: Any, one: int, other: int) -> bool:
    if events[one, s.E_TIME] != events[other, s.E_TIME]:
        return bool(events[one, s.E_TIME] < events[other, s.E_TIME])
    return bool(events[one, s.E_ORDER] < events[other, s.E_ORDER])


@compiled
def chance(net: Any) -> float:
    """A random number from 0 to 1 (splitmix64)."""
    state = net.random[0] + np.uint64(0x9E3779B97F4A7C15)
    net.random[0] = state
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return float((state ^ (state >> np.uint64(31))) >> np.uint64(11)) / 9007199254740992.0


@compiled
def new_packet(net: Any, source: int, target: int, size: int, band: int, is_ect: int, spine: int) -> int:
    """Take memory for a packet of `size` bytes on the wire; -1 if there is none."""
    packet = net.clock[s.FREE]
    if packet == s.NOTHING:
        net.clock[s.IS_FULL] = 1
        return s.NOTHING
    row = net.packets[packet]
    net.clock[s.FREE] = row[s.K_NEXT]
    row[s.K_NEXT], row[s.K_SIZE], row[s.K_SOURCE], row[s.K_TARGET] = s.NOTHING, size, source, target
    row[s.K_BAND], row[s.K_ECT], row[s.K_MARK], row[s.K_SPINE] = band, is_ect, 0, spine
    row[s.K_CONNECTION] = s.NOTHING
    row[s.K_IS_ACK] = 0
    return int(packet)


@compiled
def free(net: Any, packet: int) -> None:
    """Give a packet's memory back."""
    net.packets[packet, s.K_NEXT] = net.clock[s.FREE]
    net.clock[s.FREE] = packet


@compiled
def send(net: Any, packet: int) -> bool:
    """Put a packet into its host's own port; returns whether it fitted."""
    net.clock[s.SENT] += 1
    return enqueue(net, net.packets[packet, s.K_SOURCE], packet)


@compiled
def enqueue(net: Any, port: int, packet: int) -> bool:
    """Take a packet into a port's queue, or drop it (False); see the rules of `leaf_spine`."""
    clock, q, row = net.clock, net.ports[port], net.packets[packet]
    size, band = row[s.K_SIZE], row[s.K_BAND]
    if net.queues[port, band, s.BYTES] + size > q[s.Q_LIMIT]:
        clock[s.OVERFLOWED] += 1
        free(net, packet)
        return False
    if row[s.K_ECT] and q[s.Q_BYTES] > q[s.Q_MARK]:
        clock[s.MARKED] += 1 - row[s.K_MARK]
        row[s.K_MARK] = 1
    elif not row[s.K_ECT] and q[s.Q_BYTES] > q[s.Q_DROP]:
        clock[s.SELECTED] += 1
        free(net, packet)
        return False
    append(net, net.queues[port, band], packet)
    net.queues[port, band, s.BYTES] += size
    q[s.Q_BYTES] += size
    q[s.Q_MOST_BYTES] = max(q[s.Q_MOST_BYTES], q[s.Q_BYTES])
    if q[s.Q_SENDING] == s.NOTHING:
        _start_sending(net, port)
    return True


@compiled
def append(net: Any, queue: Any, packet: int) -> None:
    """Add a packet to a queue's list; its bytes are the caller's to count."""
    net.packets[packet, s.K_NEXT] = s.NOTHING
    if queue[s.HEAD] == s.NOTHING:
        queue[s.HEAD] = packet
    else:
        net.packets[queue[s.TAIL], s.K_NEXT] = packet
    queue[s.TAIL] = packet


@compiled
def remove_first(net: Any, queue: Any) -> int:
    """Take the first packet out of a queue's list."""
    packet = queue[s.HEAD]
    queue[s.HEAD] = net.packets[packet, s.K_NEXT]
    return int(packet)


@compiled
def _start_sending(net: Any, port: int) -> None:
    for band in range(BANDS):
        queue = net.queues[port, band]
        if queue[s.HEAD] != s.NOTHING:
            packet = remove_first(net, queue)
            size = net.packets[packet, s.K_SIZE]
            queue[s.BYTES] -= size
            net.ports[port, s.Q_BYTES] -= size
            net.ports[port, s.Q_SENDING] = packet
            took = np.int64(np.ceil(size * net.port_rates[port, s.QR_NS_PER_BYTE]))
            plan(net, net.clock[s.NOW] + took, s.DEPART, port)
            return


@compiled
def depart(net: Any, port: int) -> int:
    """A port has sent a packet: it is on the wire, or lost; the next one follows. Returns the packet, -1 if lost."""
    packet = net.ports[port, s.Q_SENDING]
    net.ports[port, s.Q_SENDING] = s.NOTHING
    _start_sending(net, port)
    loss = net.port_rates[port, s.QR_LOSS]
    if loss > 0 and chance(net) < loss:
        net.clock[s.LOST] += 1
        free(net, packet)
        return s.NOTHING
    row = net.packets[packet]
    row[s.K_NEXT] = _next_port(net, port, row)
    plan(net, net.clock[s.NOW] + net.ports[port, s.Q_WAY_NS], s.ARRIVE, packet)
    return int(packet)


@compiled
def _next_port(net: Any, port: int, row: Any) -> int:
    """Where a packet that leaves a port arrives: a port, or -1 for its host."""
    hosts, racks, spines = net.shape[0], net.shape[1], net.shape[2]
    target = row[s.K_TARGET]
    to_rack = net.rack[target]
    if port < hosts:
        here = net.rack[port]
        if here == to_rack:
            return int(hosts + target)
        spine = row[s.K_SPINE]
        if spine == _ANY_SPINE:
            spine = np.int64(chance(net) * spines)
        return int(2 * hosts + here * spines + spine % spines)
    if port < 2 * hosts:
        return s.NOTHING
    first_down = 2 * hosts + racks * spines
    if port < first_down:
        spine = (port - 2 * hosts) % spines
        return int(first_down + spine * racks + to_rack)
    return int(hosts + target)
