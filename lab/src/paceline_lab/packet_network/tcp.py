"""TCP as Linux has it: selective acknowledgements, loss found by time, tail probes, delayed acknowledgements; compiled.

Rules
1. Sequence numbers count segments. A message's last segment is shorter, and nothing waits for the next message.
2. A segment is lost if one sent later has arrived and it had a round trip and a little more to do so; at the end of
   what was sent a probe comes first, and then the timeout, of at least `min_rto` above the round trip.
3. A connection keeps at most a millisecond of its link in the host's own queue.

Source:
    RFC 8985 (RACK-TLP), sections 6 and 7; RFC 6298; RFC 2018, section 4 (which blocks an acknowledgement tells);
    RFC 5681, section 4.2, with Linux's 40 ms.
"""

from __future__ import annotations

from typing import Any

from paceline_lab.packet_network import ports
from paceline_lab.packet_network import state as s
from paceline_lab.packet_network import tcp_congestion as congestion
from paceline_lab.packet_network import tcp_state as c
from paceline_lab.packet_network.machine_code import compiled

_ACK_DELAY_NS = 40_000_000
_BLOCK_BYTES = 12
_FEW = 3
_FIRST_WINDOW = 10.0
_PROBE_SLACK_NS = 2_000_000


@compiled
def try_send(net: Any, tcp: Any, connection: int) -> None:
    """Send what the window, the host's queue, the pace and the messages allow."""
    x, f, now = tcp.connections[connection], tcp.rates[connection], net.clock[s.NOW]
    allowed = min(x[c.C_TOTAL], x[c.C_OPEN], x[c.C_GRANTED]) * x[c.C_PER_MESSAGE]
    if x[c.C_UNA] == x[c.C_NXT] and x[c.C_NXT] < allowed:
        _begin_after_idleness(x, f, now)
    while x[c.C_HOST_QUEUE] < x[c.C_HOST_LIMIT]:
        is_repeated = x[c.C_LOST] > 0
        if not is_repeated and (x[c.C_NXT] >= allowed or x[c.C_NXT] - x[c.C_UNA] >= c.RING):
            if x[c.C_FLIGHT] < f[c.F_WINDOW]:
                x[c.C_IS_LIMITED] = 0
                x[c.C_APP_LIMITED] = x[c.C_DELIVERED] + x[c.C_FLIGHT]
            return
        if x[c.C_FLIGHT] >= int(f[c.F_WINDOW]):
            x[c.C_IS_LIMITED] = 1
            return
        if x[c.C_KIND] == c.BBR:
            if now < f[c.F_PACE_AT]:
                if x[c.C_PACE_PLANNED] == 0:
                    x[c.C_PACE_PLANNED] = 1
                    ports.plan(net, int(f[c.F_PACE_AT]) + 1, s.PACE, connection)
                return
            f[c.F_PACE_AT] = max(f[c.F_PACE_AT], now - 1e6) + congestion.pause_ns(x, f)
        if is_repeated:
            sequence = x[c.C_LOST_FROM]
            while tcp.segments[connection, sequence % c.RING, c.T_STATE] != c.MISSING:
                sequence += 1
            x[c.C_LOST_FROM] = sequence + 1
            x[c.C_LOST] -= 1
            x[c.C_RETRANSMITS] += 1
        else:
            sequence = x[c.C_NXT]
            x[c.C_NXT] += 1
        x[c.C_FLIGHT] += 1
        x[c.C_REPAIR_SENT] += 1
        _emit(net, tcp, connection, sequence, is_repeated)
        if not is_repeated or x[c.C_DEADLINE] == 0:
            set_timer(net, tcp, connection)


@compiled
def _begin_after_idleness(x: Any, f: Any, now: int) -> None:
    """A window that was not used for a timeout is not trusted any more (RFC 2861)."""
    x[c.C_DELIVERED_AT] = x[c.C_FIRST_AT] = now
    if x[c.C_KIND] != c.BBR and now - x[c.C_SENT_AT] > _timeout_ns(x, f):
        f[c.F_WINDOW] = min(f[c.F_WINDOW], _FIRST_WINDOW)
    f[c.F_EPOCH] = 0


@compiled
def _emit(net: Any, tcp: Any, connection: int, sequence: int, is_repeated: bool) -> None:
    x, now = tcp.connections[connection], net.clock[s.NOW]
    is_last = (sequence + 1) % x[c.C_PER_MESSAGE] == 0
    size = c.HEADER_BYTES + (x[c.C_LAST_BYTES] if is_last else c.SEGMENT_BYTES)
    segment = tcp.segments[connection, sequence % c.RING]
    segment[c.T_STATE], segment[c.T_AT], segment[c.T_IS_REPEATED] = c.FLYING, now, is_repeated
    segment[c.T_DELIVERED], segment[c.T_DELIVERED_AT] = x[c.C_DELIVERED], x[c.C_DELIVERED_AT]
    segment[c.T_FIRST_AT] = x[c.C_FIRST_AT]
    x[c.C_SENT_AT] = now
    is_ect = x[c.C_KIND] == c.DCTCP
    packet = ports.new_packet(net, x[c.C_SOURCE], x[c.C_TARGET], size, x[c.C_BAND], is_ect, x[c.C_SPINE])
    if packet == s.NOTHING:
        return
    row = net.packets[packet]
    row[s.K_CONNECTION], row[s.K_SEQUENCE], row[s.K_TIME] = connection, sequence, now
    x[c.C_HOST_QUEUE] += 1
    if not ports.send(net, packet):
        x[c.C_HOST_QUEUE] -= 1


@compiled
def _timeout_ns(x: Any, f: Any) -> float:
    return float(f[c.F_RTT] + max(4 * f[c.F_DEVIATION], float(x[c.C_MIN_RTO])))


@compiled
def set_timer(net: Any, tcp: Any, connection: int) -> None:
    """Set the timer for what is under way: a probe where all is well, else the timeout."""
    x, f, now = tcp.connections[connection], tcp.rates[connection], net.clock[s.NOW]
    if x[c.C_UNA] == x[c.C_NXT]:
        x[c.C_DEADLINE] = 0
        return
    wait = _timeout_ns(x, f) * (1 << min(x[c.C_BACKOFF], 10))
    x[c.C_WHY] = c.TIMEOUT
    is_open = x[c.C_RECOVERY_TO] < 0 and x[c.C_LOST] == 0 and x[c.C_SACKED] == 0 and x[c.C_PROBED_TO] == 0
    if is_open:
        slack = x[c.C_MIN_RTO] if x[c.C_FLIGHT] == 1 else _PROBE_SLACK_NS
        if 2 * f[c.F_RTT] + slack < wait:
            wait, x[c.C_WHY] = 2 * f[c.F_RTT] + slack, c.PROBE
    _plan_timer(net, x, connection, now + int(wait))


@compiled
def _plan_timer(net: Any, x: Any, connection: int, deadline: int) -> None:
    x[c.C_DEADLINE] = deadline
    if x[c.C_PLANNED] == 0 or deadline < x[c.C_PLANNED]:
        x[c.C_PLANNED] = deadline
        ports.plan(net, deadline, s.TIMER, connection)


@compiled
def on_timer(net: Any, tcp: Any, connection: int) -> None:
    """The timer's event has come; it may be an old one."""
    x, f, now = tcp.connections[connection], tcp.rates[connection], net.clock[s.NOW]
    if now != x[c.C_PLANNED]:
        return
    x[c.C_PLANNED] = 0
    if x[c.C_DEADLINE] == 0:
        return
    if now < x[c.C_DEADLINE]:
        _plan_timer(net, x, connection, x[c.C_DEADLINE])
        return
    if x[c.C_WHY] == c.REORDER:
        find_lost(net, tcp, connection)
        if x[c.C_RECOVERY_TO] >= 0 and not x[c.C_IS_TIMEOUT]:
            congestion.repair(x, f, 0, False)
        try_send(net, tcp, connection)
        if x[c.C_DEADLINE] <= now:
            set_timer(net, tcp, connection)
    elif x[c.C_WHY] == c.PROBE:
        _probe(net, tcp, connection)
    else:
        for sequence in range(x[c.C_UNA], x[c.C_NXT]):
            segment = tcp.segments[connection, sequence % c.RING]
            if segment[c.T_STATE] == c.FLYING:
                segment[c.T_STATE] = c.MISSING
                x[c.C_LOST] += 1
                x[c.C_EVER_LOST] += 1
        x[c.C_FLIGHT] = 0
        x[c.C_LOST_FROM] = x[c.C_UNA]
        congestion.on_timeout(x, f)
        x[c.C_RECOVERY_TO], x[c.C_IS_TIMEOUT] = x[c.C_NXT], 1
        x[c.C_BACKOFF] += 1
        x[c.C_DEADLINE] = 0
        try_send(net, tcp, connection)
        set_timer(net, tcp, connection)


@compiled
def _probe(net: Any, tcp: Any, connection: int) -> None:
    """Send the last segment once more: what it brings back tells what is missing before it."""
    x = tcp.connections[connection]
    x[c.C_PROBED_TO] = x[c.C_NXT]
    x[c.C_RETRANSMITS] += 1
    _emit(net, tcp, connection, x[c.C_NXT] - 1, True)
    set_timer(net, tcp, connection)


@compiled
def take_segment(net: Any, tcp: Any, packet: int) -> None:
    """The receiver: note what arrived, acknowledge, hand messages over."""
    row, now = net.packets[packet], net.clock[s.NOW]
    connection, sequence = row[s.K_CONNECTION], row[s.K_SEQUENCE]
    x, got = tcp.connections[connection], tcp.got[connection]
    had_gap = x[c.C_AHEAD] > 0
    needed = x[c.C_NEEDED]
    is_new = sequence >= needed and not got[sequence % c.RING]
    x[c.C_MARKS] += row[s.K_MARK]
    if is_new and sequence == needed:
        needed += 1
        while got[needed % c.RING]:
            got[needed % c.RING] = 0
            x[c.C_AHEAD] -= 1
            needed += 1
        x[c.C_NEEDED] = needed
    elif is_new:
        got[sequence % c.RING] = 1
        x[c.C_AHEAD] += 1
        _note_block(x, got, sequence)
    x[c.C_PENDING] += 1
    is_changed = x[c.C_KIND] == c.DCTCP and row[s.K_MARK] != x[c.C_LAST_MARK]
    x[c.C_LAST_MARK] = row[s.K_MARK]
    if had_gap or not is_new or x[c.C_AHEAD] > 0 or x[c.C_PENDING] >= 2 or is_changed:
        acknowledge(net, tcp, connection, row[s.K_TIME])
    elif x[c.C_ACK_PLANNED] == 0:
        x[c.C_ACK_PLANNED] = now + _ACK_DELAY_NS
        ports.plan(net, now + _ACK_DELAY_NS, s.ACK_TIMER, connection)
    while x[c.C_NEEDED] >= (x[c.C_MESSAGES] + 1) * x[c.C_PER_MESSAGE]:
        x[c.C_MESSAGES] += 1
        ports.plan(net, now + tcp.running[1], s.APP, connection)


@compiled
def _note_block(x: Any, got: Any, sequence: int) -> None:
    """Keep the run around what arrived last as the first block; the others move back."""
    low, high = sequence, sequence + 1
    while low > x[c.C_NEEDED] + 1 and got[(low - 1) % c.RING]:
        low -= 1
    while got[high % c.RING]:
        high += 1
    b = c.C_BLOCKS
    if not (low <= x[b] and x[b + 1] <= high):
        if not (low <= x[b + 2] and x[b + 3] <= high):
            x[b + 4], x[b + 5] = x[b + 2], x[b + 3]
        x[b + 2], x[b + 3] = x[b], x[b + 1]
    x[b], x[b + 1] = low, high


@compiled
def on_ack_timer(net: Any, tcp: Any, connection: int) -> None:
    """The time for a delayed acknowledgement has come."""
    x = tcp.connections[connection]
    x[c.C_ACK_PLANNED] = 0
    if x[c.C_PENDING] > 0:
        acknowledge(net, tcp, connection, 0)


@compiled
def acknowledge(net: Any, tcp: Any, connection: int, echo: int) -> None:
    """Say what has arrived."""
    x = tcp.connections[connection]
    x[c.C_PENDING] = 0
    has_blocks = x[c.C_AHEAD] > 0
    size = c.HEADER_BYTES + (_BLOCK_BYTES if has_blocks else 0)
    is_ect = x[c.C_KIND] == c.DCTCP
    packet = ports.new_packet(net, x[c.C_TARGET], x[c.C_SOURCE], size, x[c.C_BAND], is_ect, x[c.C_SPINE])
    if packet == s.NOTHING:
        return
    row = net.packets[packet]
    row[s.K_CONNECTION], row[s.K_IS_ACK], row[s.K_SEQUENCE] = connection, 1, x[c.C_NEEDED]
    row[s.K_TIME], row[s.K_MARKS] = echo, x[c.C_MARKS]
    for i in range(6):
        row[s.K_BLOCKS + i] = x[c.C_BLOCKS + i] if has_blocks else 0
    ports.send(net, packet)


@compiled
def take_ack(net: Any, tcp: Any, packet: int) -> None:
    """The sender: learn what arrived, find what did not, adapt, go on."""
    row, now = net.packets[packet], net.clock[s.NOW]
    connection, upto = row[s.K_CONNECTION], row[s.K_SEQUENCE]
    x, f = tcp.connections[connection], tcp.rates[connection]
    delivered, una = x[c.C_DELIVERED], x[c.C_UNA]
    x[c.C_RACK_RTT] = 0
    rate = 0.0
    for sequence in range(una, upto):
        rate = max(rate, _confirm(tcp, connection, sequence, now, is_last=True))
    x[c.C_UNA] = max(una, upto)
    x[c.C_HIGH] = max(x[c.C_HIGH], x[c.C_UNA])
    for block in range(3):
        low, high = row[s.K_BLOCKS + 2 * block], row[s.K_BLOCKS + 2 * block + 1]
        for sequence in range(max(low, x[c.C_UNA]), high):
            rate = max(rate, _confirm(tcp, connection, sequence, now, is_last=False))
    good = x[c.C_DELIVERED] - delivered
    rtt = float(x[c.C_RACK_RTT])
    if rtt > 0:
        _note_round_trip(f, rtt, now)
    if good:
        x[c.C_BACKOFF] = 0
        x[c.C_DELIVERED_AT] = now
        x[c.C_LOST_FROM] = max(x[c.C_LOST_FROM], x[c.C_UNA])
    if x[c.C_PROBED_TO] and x[c.C_UNA] >= x[c.C_PROBED_TO]:
        x[c.C_PROBED_TO] = 0
    if x[c.C_RECOVERY_TO] >= 0 and x[c.C_UNA] >= x[c.C_RECOVERY_TO]:
        congestion.end_repair(x, f)
        x[c.C_RECOVERY_TO], x[c.C_IS_TIMEOUT] = s.NOTHING, 0
    marked = row[s.K_MARKS] - x[c.C_MARKS_SEEN]
    if marked > 0:
        x[c.C_MARKS_SEEN] = row[s.K_MARKS]
    if good:
        congestion.on_ack(x, f, good, max(marked, 0), rtt, rate, now)
        if x[c.C_APP_LIMITED] <= x[c.C_DELIVERED]:
            x[c.C_APP_LIMITED] = 0
        set_timer(net, tcp, connection)
    missing = x[c.C_LOST]
    find_lost(net, tcp, connection)
    if x[c.C_RECOVERY_TO] >= 0 and not x[c.C_IS_TIMEOUT]:
        congestion.repair(x, f, good, x[c.C_UNA] > una and x[c.C_LOST] <= missing)
    try_send(net, tcp, connection)


@compiled
def _confirm(tcp: Any, connection: int, sequence: int, now: int, is_last: bool) -> float:
    """A segment has arrived; returns the rate at which segments were delivered since it was sent."""
    x, segment = tcp.connections[connection], tcp.segments[connection, sequence % c.RING]
    state = segment[c.T_STATE]
    if is_last:
        segment[c.T_STATE] = c.UNSENT
    if state == c.SACKED:
        x[c.C_SACKED] -= is_last
        return 0.0
    if state == c.UNSENT:
        return 0.0
    if state == c.FLYING:
        x[c.C_FLIGHT] -= 1
    else:
        x[c.C_LOST] -= 1
    if not is_last:
        segment[c.T_STATE] = c.SACKED
        x[c.C_SACKED] += 1
    x[c.C_DELIVERED] += 1
    at = segment[c.T_AT]
    if not segment[c.T_IS_REPEATED]:
        if sequence + 1 < x[c.C_HIGH]:
            x[c.C_REORDERED] = 1
        x[c.C_RACK_RTT] = now - at
    x[c.C_HIGH] = max(x[c.C_HIGH], sequence + 1)
    if at > x[c.C_RACK_AT] or (at == x[c.C_RACK_AT] and sequence > x[c.C_RACK_SEQUENCE]):
        x[c.C_RACK_AT], x[c.C_RACK_SEQUENCE] = at, sequence
    x[c.C_FIRST_AT] = max(x[c.C_FIRST_AT], at)
    took = max(at - segment[c.T_FIRST_AT], now - segment[c.T_DELIVERED_AT])
    return float((x[c.C_DELIVERED] - segment[c.T_DELIVERED]) / took) if took > 0 else 0.0


@compiled
def _note_round_trip(f: Any, rtt: float, now: int) -> None:
    error = rtt - f[c.F_RTT]
    f[c.F_RTT] += error / 8
    f[c.F_DEVIATION] += (abs(error) - f[c.F_DEVIATION]) / 4
    if rtt < f[c.F_MIN_RTT] or now - f[c.F_MIN_RTT_AT] > 10e9:
        f[c.F_MIN_RTT], f[c.F_MIN_RTT_AT] = rtt, now


@compiled
def find_lost(net: Any, tcp: Any, connection: int) -> None:
    """Take for lost what had its time; set the timer for what has a little left."""
    x, f, now = tcp.connections[connection], tcp.rates[connection], net.clock[s.NOW]
    if x[c.C_HIGH] <= x[c.C_UNA]:
        return
    is_strict = x[c.C_SACKED] >= _FEW or x[c.C_RECOVERY_TO] >= 0
    least = congestion.least_rtt(f)
    grace = 0.0 if is_strict and not x[c.C_REORDERED] else least / 4
    limit = least if is_strict and not x[c.C_REORDERED] else f[c.F_RTT] + grace
    found, soonest = 0, 1e18
    for sequence in range(x[c.C_UNA], x[c.C_HIGH]):
        segment = tcp.segments[connection, sequence % c.RING]
        if segment[c.T_STATE] != c.FLYING:
            continue
        at = segment[c.T_AT]
        if at > x[c.C_RACK_AT] or (at == x[c.C_RACK_AT] and sequence > x[c.C_RACK_SEQUENCE]):
            continue
        if now - at >= limit or (is_strict and not x[c.C_REORDERED] and not segment[c.T_IS_REPEATED]):
            segment[c.T_STATE] = c.MISSING
            x[c.C_FLIGHT] -= 1
            x[c.C_LOST] += 1
            x[c.C_EVER_LOST] += 1
            found += 1
        else:
            soonest = min(soonest, limit - (now - at))
    if found:
        x[c.C_LOST_FROM] = x[c.C_UNA]
        if x[c.C_RECOVERY_TO] < 0:
            x[c.C_RECOVERY_TO] = x[c.C_NXT]
            congestion.on_loss(x, f)
    if soonest < 1e18:
        x[c.C_WHY] = c.REORDER
        _plan_timer(net, x, connection, now + int(soonest) + 1)


@compiled
def hand_over(net: Any, tcp: Any, connection: int) -> None:
    """The receiving process has a message: it may send its next one, and takes another (Gloo's ring)."""
    x = tcp.connections[connection]
    x[c.C_SEEN] += 1
    seen = x[c.C_SEEN] - x[c.C_BASE]
    if x[c.C_SEEN] == x[c.C_TOTAL]:
        x[c.C_DONE_AT] = net.clock[s.NOW]
        tcp.running[0] -= 1
    if x[c.C_GRANTS] >= 0:
        other = x[c.C_GRANTS]
        tcp.connections[other, c.C_GRANTED] = x[c.C_SEEN]
        try_send(net, tcp, other)
    if x[c.C_NEXT] >= 0:
        first = x[c.C_FIRST_PHASE]
        opened = x[c.C_BASE] + (min(first, seen + 2) if seen < first else seen + 2)
        for other in (x[c.C_NEXT], x[c.C_NOTIFY]):
            tcp.connections[other, c.C_OPEN] = max(tcp.connections[other, c.C_OPEN], opened)
            try_send(net, tcp, other)
