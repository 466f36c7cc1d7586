"""The loop from event to event, and how datagrams enter and leave the network; compiled."""

from __future__ import annotations

from typing import Any

from paceline.transports.bounded_loss.datagram import tos_of
from paceline_lab.packet_network import ports, tcp
from paceline_lab.packet_network import state as s
from paceline_lab.packet_network import tcp_state as c
from paceline_lab.packet_network.machine_code import compiled, entry

DATAGRAM_HEADERS = 14 + 20 + 8  # Ethernet, IP, UDP
_LOWEST_BAND = 7  # class selector 0
_ECN = 3


@entry
def run_until(net: Any, connections: Any, until_ns: int, ends_with_messages: bool) -> None:
    """Let time pass until then; or let TCP begin to send what it may, and end when the last message has arrived."""
    clock = net.clock
    if ends_with_messages:
        for connection in range(connections.connections.shape[0]):
            tcp.try_send(net, connections, connection)
    while clock[s.EVENTS] > 0 and net.events[0, s.E_TIME] <= until_ns:
        what = ports.take_event(net)
        kind, index = what >> s.KIND_SHIFT, what & ((1 << s.KIND_SHIFT) - 1)
        if kind == s.DEPART:
            _depart(net, connections, index)
        elif kind == s.ARRIVE:
            _arrive(net, connections, index)
        elif kind == s.TIMER:
            tcp.on_timer(net, connections, index)
        elif kind == s.ACK_TIMER:
            tcp.on_ack_timer(net, connections, index)
        elif kind == s.PACE:
            connections.connections[index, c.C_PACE_PLANNED] = 0
            tcp.try_send(net, connections, index)
        else:
            tcp.hand_over(net, connections, index)
            if ends_with_messages and connections.running[0] == 0:
                return
    clock[s.NOW] = max(clock[s.NOW], until_ns)


@compiled
def _depart(net: Any, connections: Any, port: int) -> None:
    row = net.packets[net.ports[port, s.Q_SENDING]]
    connection = s.NOTHING
    if port < net.shape[0] and row[s.K_CONNECTION] >= 0 and not row[s.K_IS_ACK]:
        connection = row[s.K_CONNECTION]
    ports.depart(net, port)
    if connection >= 0:
        connections.connections[connection, c.C_HOST_QUEUE] -= 1
        tcp.try_send(net, connections, connection)


@compiled
def _arrive(net: Any, connections: Any, packet: int) -> None:
    row = net.packets[packet]
    if row[s.K_NEXT] != s.NOTHING:
        ports.enqueue(net, row[s.K_NEXT], packet)
        return
    if row[s.K_CONNECTION] < 0:
        queue = net.arrived[row[s.K_TARGET]]
        ports.append(net, queue, packet)
        queue[s.BYTES] += 1
        return
    if row[s.K_IS_ACK]:
        tcp.take_ack(net, connections, packet)
    else:
        tcp.take_segment(net, connections, packet)
    net.clock[s.DELIVERED] += 1
    ports.free(net, packet)


@entry
def send_datagrams(
    net: Any, rows: Any, words: Any, sizes: Any, hosts: Any, source: int, count: int, spines: Any
) -> None:
    """Put datagrams of the bounded-loss protocol into their host's port, in the band of their class selector.

    Args:
        net: The network.
        rows: Their bytes, one a row, and the same as
        words: 32-bit words.
        sizes: Bytes of each.
        hosts: To which host each goes.
        source: The host that sends them.
        count: How many.
        spines: Of the flow of each; -1 sprays.
    """
    for i in range(count):
        tos = tos_of(words[i])
        band, is_ect = _LOWEST_BAND - (tos >> 5), 1 if tos & _ECN else 0
        way = spines[i] if spines[i] < 0 else spines[i] + hosts[i] * 40503
        packet = ports.new_packet(net, source, hosts[i], sizes[i] + DATAGRAM_HEADERS, band, is_ect, way)
        if packet == s.NOTHING:
            return
        net.packets[packet, s.K_BYTES] = sizes[i]
        for byte in range(sizes[i]):
            net.datagrams[packet, byte] = rows[i, byte]
        ports.send(net, packet)


@entry
def take_datagrams(net: Any, host: int, rows: Any, sizes: Any, marks: Any) -> int:
    """Move what has arrived at a host into rows; returns how many."""
    queue = net.arrived[host]
    count = 0
    while queue[s.HEAD] != s.NOTHING and count < sizes.shape[0]:
        packet = ports.remove_first(net, queue)
        queue[s.BYTES] -= 1
        size = net.packets[packet, s.K_BYTES]
        for byte in range(size):
            rows[count, byte] = net.datagrams[packet, byte]
        sizes[count], marks[count] = size, net.packets[packet, s.K_MARK]
        net.clock[s.DELIVERED] += 1
        ports.free(net, packet)
        count += 1
    return count


@entry
def queued_bytes(net: Any, host: int) -> int:
    """What a host's own port holds, the packet that is leaving included."""
    sending = net.ports[host, s.Q_SENDING]
    return int(net.ports[host, s.Q_BYTES] + (net.packets[sending, s.K_SIZE] if sending != s.NOTHING else 0))
